"""The errors that communication raises."""

from lab.errors import WorkbookError


class CommError(WorkbookError):
    """A communication failed. The text names the operation and the peer, and says where to look."""


class Mismatch(CommError):
    """The ranks called operations that do not fit together. All raise it, and the group stays usable."""

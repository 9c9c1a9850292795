"""The errors that communication raises."""

from lab.launch.errors import WorkbookError


class CommError(WorkbookError):
    """A communication failed or cannot start. The text says what is wrong, and where to look."""


class Mismatch(CommError):
    """The ranks called operations that do not fit together. All raise it, and the group stays usable."""

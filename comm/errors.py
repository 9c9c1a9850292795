"""The errors that communication raises."""

from lab.launch.errors import WorkbookError


class CommError(WorkbookError):
    """A communication failed or cannot start. The text says what is wrong, and where to look."""


class LostRank(WorkbookError):
    """Another rank has died, or does not answer, so this rank cannot do what the text says."""


class Mismatch(CommError):
    """The ranks called operations that do not fit together. All raise it, and the group stays usable."""

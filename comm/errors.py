"""What communication raises."""

from lab.errors import WorkbookError


class CommError(WorkbookError):
    """A communication cannot go on; the text says which one, with whom, and what to look for."""


class Mismatch(CommError):
    """The ranks' operations do not fit together: all ranks raise it, and their group stays usable."""

"""Errors that need no stack trace."""


class WorkbookError(RuntimeError):
    """What went wrong and how to mend it, in a sentence. Scripts print the text and exit with 1."""

"""Errors that need no stack trace."""


class WorkbookError(RuntimeError):
    """What went wrong and how to mend it, in a sentence. Scripts print it and exit with `exit_code`."""

    exit_code = 1


class Stopped(WorkbookError):
    """The user asked to stop, and all is saved."""

    exit_code = 130  # 128 + SIGINT, as shells have it

"""Errors that need no stack trace, and a short reason for all other errors."""


class WorkbookError(RuntimeError):
    """An error whose text says what is wrong and how to mend it. Scripts print it, and exit with its code."""

    exit_code = 1


class Stopped(WorkbookError):
    """The end of a run that the user asked to stop. Everything is saved."""

    exit_code = 130  # 128 + SIGINT, as shells have it


def reason(error: BaseException) -> str:
    """Return the first line of an error's text, without its number and its class."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error).partition("\n")[0] or type(error).__name__

"""Define errors that need no stack trace, and give a short reason for all other errors."""


class WorkbookError(RuntimeError):
    """Tell the user what is wrong and how to fix it. Scripts print this text, and exit with `exit_code`."""

    exit_code = 1


class Stopped(WorkbookError):
    """Say that a run ends because the user asked it to stop. Everything is saved."""

    exit_code = 130  # 128 + SIGINT, as in shells


def reason(error: BaseException) -> str:
    """Return the first line of an error's text, without the number of an OSError, or else its class."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error).partition("\n")[0] or type(error).__name__

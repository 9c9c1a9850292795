"""Errors that need no stack trace, and how to say others in a sentence."""


class WorkbookError(RuntimeError):
    """What went wrong and how to mend it, in a sentence. Scripts print it and exit with `exit_code`."""

    exit_code = 1


class Stopped(WorkbookError):
    """The user asked to stop, and all is saved."""

    exit_code = 130  # 128 + SIGINT, as shells have it


def reason(error: BaseException) -> str:
    """Return what an error says in its first line, without its number or its class."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error).partition("\n")[0] or type(error).__name__

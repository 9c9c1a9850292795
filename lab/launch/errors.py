"""Define errors that need no stack trace, and give a short reason for all other errors."""


class WorkbookError(RuntimeError):
    """Tell the user what is wrong and how to fix it. Scripts print this text, and exit with `exit_code`."""

    exit_code = 1
    concerns_all = False  # each rank prints it, although rank 0 does

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class UsageError(WorkbookError):
    """Say what is wrong in a command line."""

    exit_code = 2


class Stopped(WorkbookError):
    """Say that a run ends early because it was asked to stop. Everything is saved."""

    BY_USER = 130  # 128 + SIGINT, as in shells
    BY_SCHEDULER = 75  # EX_TEMPFAIL of sysexits.h: the same command may be started again

    def __init__(self, text: str, exit_code: int = BY_USER) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Complete(WorkbookError):
    """Say that a run has nothing left to do, because its checkpoint has all steps."""

    exit_code = 0


def reason(error: BaseException) -> str:
    """Return the first line of an error's text, without the number of an OSError, or else its class."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error).partition("\n")[0] or type(error).__name__

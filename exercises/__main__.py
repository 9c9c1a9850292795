"""Do the exercises: `python -m exercises` shows the next one, and `python -m exercises check` grades it."""

import errno
import shlex
import sys


def main() -> int:
    """Run the command line. Without the workbook's libraries, say in a sentence what to type."""
    try:
        from exercises.commands import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("exercises", "lab", "comm"):
            raise
        arguments = shlex.join(sys.argv[1:])
        by_make = f'make exercises ARGS="{arguments}"' if arguments else "make exercises"
        print(
            f"This Python has no {error.name}. Type: {by_make}\n"
            "Or make the environment with `make setup`, and activate it in each new terminal: "
            ". .venv/bin/activate",
            file=sys.stderr,
        )
        return 1
    try:
        return run()
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        print(
            f"{error.filename} cannot be written: {error.strerror}. Copy the workbook to a "
            "folder of yours, and do the exercises there.",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())

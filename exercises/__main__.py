"""Do the exercises: `python -m exercises` shows the next one, and `python -m exercises check` grades it."""

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
    return run()


if __name__ == "__main__":
    sys.exit(main())

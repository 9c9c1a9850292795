"""Say how the reader types a command of the exercises, in the way in which the reader has started them."""

import os

BY_MAKE = "EXERCISES_BY_MAKE"  # the Makefile sets this variable


def typed(arguments: str) -> str:
    """Return the command with these arguments: "python -m exercises check zero1", or the one of make."""
    return (
        f"make exercises ARGS='{arguments}'" if BY_MAKE in os.environ else f"python -m exercises {arguments}"
    )

"""The environment variables of a rendezvous, read and validated."""

import math
import os

from comm.wire import CommError


def number(name: str) -> int | None:
    """Return the number in that variable, None where it is unset or empty."""
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise CommError(f"{name} is {text!r}; it must be a whole number.")
    return int(text) if text else None


def seconds(name: str, default: float) -> float:
    """Return the seconds in that variable, or `default`."""
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise CommError(f"{name} is {text!r}; it must be a number of seconds above 0.")
    return value


def master() -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT: where rank 0 opens the store."""
    host, port = os.environ.get("MASTER_ADDR") or "localhost", number("MASTER_PORT")
    if host in ("0.0.0.0", "::"):
        raise CommError(
            f"MASTER_ADDR is {host}, which is every interface; it must be the address of rank 0's machine "
            "in the network of the ranks, or 127.0.0.1 if all run here."
        )
    if port is not None and port > 65535:
        raise CommError(f"MASTER_PORT is {port}; it must be at most 65535.")
    return host, 29500 if port is None else port

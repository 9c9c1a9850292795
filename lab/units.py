"""Read times and rates as people write them: 0.2ms, 1gbit. The spelling is that of tc and of LINK."""

import re

from lab.errors import WorkbookError

KIB, MIB = 1 << 10, 1 << 20  # bytes
MAX_SECONDS = 7 * 24 * 3600  # of a timeout: torch counts milliseconds in 32 bits, which 25 days fill
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def seconds(text: str) -> float:
    """Return the seconds in "20ms", "500us" or "1.5s". WorkbookError for anything else, or above a week."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip().lower())
    if match is None:
        raise WorkbookError(f"{text!r} is not a time; write one such as 2ms, 500us or 1s")
    value = float(match[1]) * _SECONDS[match[2]]
    if value > MAX_SECONDS:
        raise WorkbookError(f"{text!r} is more than a week; write a time such as 2ms, 500us or 1s")
    return value


def bytes_per_second(text: str) -> float:
    """Return the bytes per second in "200mbit" or "1gbit". WorkbookError for anything else, or zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise WorkbookError(f"{text!r} is not a rate; write one such as 100mbit or 1gbit")
    return float(match[1]) * _BITS[match[2]] / 8

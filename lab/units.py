"""Read times and rates (0.2ms, 1gbit), and show times, sizes and rates (75.97 ms, 1.5 MB, 19.20 Gbit/s)."""

import re
from collections.abc import Sequence

from rich import filesize

from lab.launch.errors import WorkbookError

KIB, MIB = 1 << 10, 1 << 20  # bytes
MAX_SECONDS = 7 * 24 * 3600  # the longest timeout: torch counts milliseconds in 32 bits, which is 25 days
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def seconds(text: str) -> float:
    """Return the seconds in "20ms", "500us" or "1.5s". Raise WorkbookError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip().lower())
    if match is None:
        raise WorkbookError(f"{text!r} is not a time; write one such as 2ms, 500us or 1s")
    value = float(match[1]) * _SECONDS[match[2]]
    if value > MAX_SECONDS:
        raise WorkbookError(f"{text!r} is more than a week; write a time such as 2ms, 500us or 1s")
    return value


def bytes_per_second(text: str) -> float:
    """Return the bytes per second in "200mbit" or "1gbit". Raise WorkbookError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise WorkbookError(f"{text!r} is not a rate; write one such as 100mbit or 1gbit")
    return float(match[1]) * _BITS[match[2]] / 8


def show_seconds(seconds: float) -> str:
    """Return the time in a suitable unit: "1.250 s", "75.97 ms", "31.40 us" or "0.2500 ns"."""
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(float(f"{seconds:.4g}")) >= length:
            return f"{_four_digits(seconds / length)} {unit}"
    return f"{_four_digits(seconds * 1e9)} ns" if seconds else "0 s"


def show_bytes(num_bytes: float) -> str:
    """Return the size in a suitable unit, a power of 1000: "774.9 kB" or "3.3 MB"."""
    return filesize.decimal(round(num_bytes))


def show_rate(seconds_per_byte: float) -> str:
    """Return the rate of a link from its seconds per byte: "19.20 Gbit/s"."""
    return (
        f"{_four_digits(8e-9 / seconds_per_byte)} Gbit/s" if seconds_per_byte > 0 else "too fast to measure"
    )


def show_checked(counted: Sequence[int], formula: Sequence[int]) -> str:
    """Return the end of a sentence: whether what was counted is what the formula says."""
    if list(counted) == list(formula):
        return ", as the formula says"
    found, expected = (" and ".join(f"{value:,}" for value in values) for values in (counted, formula))
    return f"; {found} in all, where the formula says {expected}"


def _four_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:#.4g}"

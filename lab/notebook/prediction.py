"""Ask the reader of a notebook for a prediction before a run, and show it beside the measured result.

guess = predict("How many times too large are the gradients?", example=1.0)     asks, and waits
...                                                                             the run
guess.compare(measured)

predicted  1
measured   2              wrong

An answer is a number (2, 0.5, 1/2, 50%) or a range (1-2). Enter alone skips the question.
"""

import html
import re
from dataclasses import dataclass

CLOSE = 0.1  # of a measured number that is not whole
NO_KEYBOARD = "(an example, because there is no keyboard)"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_ANSWER = re.compile(rf"({_NUMBER})(?:/({_NUMBER}))?(%?)")


@dataclass(frozen=True)
class Comparison:
    """A prediction beside the measured result, as text and as a table."""

    predicted: tuple[float, float] | None  # the ends of the range; a single number is both
    measured: float
    unit: str = ""
    by: str = "measured"

    @property
    def verdict(self) -> str:
        """Return "right", "wrong" or "not predicted".

        A range is right if the result is in it, and a number if a whole result equals it or another result
        is within a tenth of it.
        """
        if self.predicted is None:
            return "not predicted"
        low, high = self.predicted
        if low == high and not float(self.measured).is_integer():
            low, high = sorted((low * (1 - CLOSE), low * (1 + CLOSE)))
        return "right" if low <= self.measured <= high else "wrong"

    def _rows(self) -> list[tuple[str, str, str]]:
        unit = f" {self.unit}" if self.unit else ""
        ends = dict.fromkeys(f"{end:.4g}" for end in self.predicted or ())
        return [
            ("predicted", f"{' to '.join(ends)}{unit}" if ends else "", ""),
            (self.by, f"{self.measured:.4g}{unit}", self.verdict),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{name:<10} {value:<14} {note}".rstrip() for name, value, note in self._rows())

    def _repr_html_(self) -> str:
        rows = (
            "<tr>"
            + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row)
            + "</tr>"
            for row in self._rows()
        )
        return f"<table>{''.join(rows)}</table>"


@dataclass(frozen=True)
class Prediction:
    """A range that the reader has predicted, or None."""

    value: tuple[float, float] | None
    unit: str = ""

    def compare(self, measured: float, by: str = "measured") -> Comparison:
        """Return the prediction beside the measured number, or beside that of what `by` names."""
        return Comparison(self.value, float(measured), self.unit, by)


def predict(question: str, example: float, unit: str = "") -> Prediction:
    """Ask for a number. Where there is no keyboard, return `example`, a guess that many readers make."""
    prompt = f"{question} [{unit or 'a number'}, or Enter to skip] "
    while True:
        try:
            text = input(prompt).strip()
            return Prediction(_range_of(text, unit) if text else None, unit)
        except (ValueError, ZeroDivisionError):
            print(f"{text!r} is not a number. Type one, such as 2, 0.5, 1/2 or 50%, or a range such as 1-2.")
        except (EOFError, RuntimeError):  # the latter in a kernel whose frontend cannot ask
            answer = f"{example:g} {unit}".rstrip()
            print(f"{question} {answer} {NO_KEYBOARD}")
            return Prediction((example, example), unit)


def _range_of(text: str, unit: str) -> tuple[float, float]:
    """Return both ends of the range in an answer. Raise ValueError if there is none."""
    plain = text.replace(",", "").replace(" ", "").removesuffix(unit.replace(" ", ""))
    between = re.fullmatch(rf"({_ANSWER.pattern})(?:-|–|to|\.\.)({_ANSWER.pattern})", plain)
    parts = [between[1], between[5]] if between else [plain]
    if between and parts[0][-1] != "%" == parts[1][-1]:  # 40-50%
        parts[0] += "%"
    low, *_, high = sorted(_number(part, unit) for part in (parts[0], parts[-1]))
    return low, high


def _number(text: str, unit: str) -> float:
    if (found := _ANSWER.fullmatch(text)) is None:
        raise ValueError(text)
    number = float(found[1]) / float(found[2] or 1)
    return number / 100 if found[3] and unit != "%" else number

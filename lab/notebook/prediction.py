"""Ask the reader of a notebook for a prediction before a run, and show it beside the measured result.

guess = predict("How many times too large are the gradients?", example=1.0)     asks, and waits
...                                                                             the run
guess.compare(measured)

                 times
predicted        1.000
measured         2.000      2.000 times the prediction
"""

import html
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """A prediction beside the measured result, as text and as a table."""

    predicted: float
    measured: float
    unit: str

    @property
    def verdict(self) -> str:
        """Return in words how far the prediction was from the result."""
        if self.predicted == self.measured:
            return "exactly as predicted"
        if self.predicted == 0:
            return "the prediction was 0"
        ratio = self.measured / self.predicted
        return "as predicted, within 5 %" if 0.95 <= ratio <= 1.05 else f"{ratio:.4g} times the prediction"

    def _rows(self) -> list[tuple[str, str, str]]:
        unit = f" {self.unit}" if self.unit else ""
        return [
            ("predicted", f"{self.predicted:#.4g}{unit}", ""),
            ("measured", f"{self.measured:#.4g}{unit}", self.verdict),
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
    """A number that the reader has predicted."""

    value: float
    unit: str = ""

    def compare(self, measured: float) -> Comparison:
        """Return the prediction beside the measured number."""
        return Comparison(self.value, float(measured), self.unit)


def predict(question: str, example: float, unit: str = "") -> Prediction:
    """Ask for a number. Where there is no keyboard, return `example`, a guess that many readers make."""
    prompt = f"{question} [{unit or 'a number'}] "
    while True:
        try:
            text = input(prompt).strip()
            return Prediction(float(text.replace(",", "")), unit)
        except ValueError:
            print(f"{text!r} is not a number. Type one, such as 2 or 0.5.")
        except (EOFError, RuntimeError):  # the latter in a kernel whose frontend cannot ask
            answer = f"{example:g} {unit}".rstrip()
            print(f"{question} {answer} (an example, because there is no keyboard)")
            return Prediction(example, unit)

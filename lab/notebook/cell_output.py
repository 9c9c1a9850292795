"""Show what cells on ranks print and return: as text in a terminal, as tables and blocks in a notebook."""

import html
from collections.abc import Sequence
from typing import TextIO

from IPython.display import HTML, display

from lab.ranks.output import is_in_a_notebook, print_tagged

LIVE_LINES = 40  # of a cell in a notebook are shown as they come; a longer output is collapsed, by rank
_LEFT = "style='text-align:left;vertical-align:top'"


class Values:
    """The values of a cell's last expression by rank. Equal ones are shown once."""

    def __init__(self, by_rank: dict[int, str]) -> None:
        self._groups: dict[str, list[int]] = {}
        for rank, text in by_rank.items():
            self._groups.setdefault(text, []).append(rank)

    def __repr__(self) -> str:
        blocks = []
        for text, ranks in self._groups.items():
            separator = "\n" if "\n" in text else " "
            blocks.append(f"{name_of(ranks)}:{separator}{text}")
        return "\n".join(blocks)

    def _repr_html_(self) -> str:
        heads = "".join(
            f"<th style='text-align:left'>{name_of(ranks)}</th>" for ranks in self._groups.values()
        )
        cells = "".join(f"<td {_LEFT}><pre>{html.escape(text)}</pre></td>" for text in self._groups)
        return f"<table><tr>{heads}</tr><tr>{cells}</tr></table>"


class Table:
    """Rows of texts below their heads."""

    def __init__(self, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self._rows = [[str(cell) for cell in row] for row in (heads, *rows)]

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        return "\n".join(
            "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in self._rows
        )

    def _repr_html_(self) -> str:
        heads, *rows = (
            "<tr>" + "".join(f"<{tag} {_LEFT}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for tag, row in zip(("th", *("td",) * len(self._rows)), self._rows, strict=False)
        )
        return f"<table>{heads}{''.join(rows)}</table>"


class CellOutput:
    """The lines that a cell prints, tagged by rank. In a notebook a long output ends in collapsed blocks."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] = []

    def show(self, rank: int, line: str, stream: TextIO) -> None:
        """Show a line as it comes."""
        self._lines.append((rank, line))
        if len(self._lines) <= LIVE_LINES or not is_in_a_notebook():
            print_tagged(rank, line, stream)

    def finish(self) -> None:
        """Show an output that was too long to be shown as it came: one collapsed block for each rank."""
        lines, self._lines = self._lines, []
        if len(lines) <= LIVE_LINES or not is_in_a_notebook():
            return
        for rank in sorted({rank for rank, _ in lines}):
            own = [line for r, line in lines if r == rank]
            summary = f"<summary>rank {rank}: {len(own)} lines</summary>"
            text = html.escape("\n".join(own))
            display(HTML(f"<details>{summary}<pre>{text}</pre></details>"))


def name_of(ranks: Sequence[int]) -> str:
    """Return "rank 0" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

"""Run the cells of a notebook on ranks that stay: an extension of IPython, for JupyterLab and the terminal.

      %load_ext lab.notebook
      %ranks 4                      start four ranks; %ranks 2 cuda spreads them over this machine's GPUs
      %ranks status                 show each rank's process, device, memory and variables
      %ranks restart                start them again, without their variables; %ranks stop ends them

      %%ranks                       run this cell on all ranks; variables stay from cell to cell
      x = torch.ones(2) * rank
      dist.all_reduce(x)
      x                             the value on each rank is shown; equal values are shown once

      %%rank 0,2                    run this cell on ranks 0 and 2
      %%ranks --timeline            and draw the spans that lab.trace.timeline has recorded in it

      pull("x")                     {0: tensor([6., 6.]), 1: ...} in the notebook's own process
      push(lr=0.1)                  set a variable on all ranks

The stop button ends a cell within two seconds, also in a deadlock, and says where each rank was.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.display import display
from rich.table import Table

from lab.launch.errors import WorkbookError
from lab.ranks.cells import Reply
from lab.ranks.standing import StandingRanks
from lab.units import show_bytes

DEFAULT_RANKS = 4
TIMELINE = "--timeline"
_LEFT = "style='text-align:left;vertical-align:top'"


class Values:
    """The values of a cell's last expression by rank. Equal ones are shown once."""

    def __init__(self, by_rank: dict[int, str]) -> None:
        self._groups: dict[str, list[int]] = {}
        for rank, text in by_rank.items():
            self._groups.setdefault(text, []).append(rank)

    def __repr__(self) -> str:
        lines = []
        for text, ranks in self._groups.items():
            separator = "\n" if "\n" in text else " "
            lines.append(f"{name_of(ranks)}:{separator}{text}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th {_LEFT}>{name_of(ranks)}</th>" for ranks in self._groups.values())
        cells = "".join(f"<td {_LEFT}><pre>{html.escape(text)}</pre></td>" for text in self._groups)
        return f"<table><tr>{heads}</tr><tr>{cells}</tr></table>"


def name_of(ranks: Sequence[int]) -> str:
    """Return "rank 0" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@magics_class
class RanksMagics(Magics):
    """The magic commands, and the ranks that they have started."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._ranks: StandingRanks | None = None

    @line_magic("ranks")  # type: ignore[arg-type]
    def manage(self, line: str) -> None:
        """Start ranks (%ranks 4), or restart, stop or show them: see lab/notebook/magics.py."""
        what, *more = line.split() or ["status"]
        if what.isdecimal() and int(what) and more in ([], ["cpu"], ["cuda"]):
            new = StandingRanks(int(what), *more)
            self.stop()
            self._ranks = new
        elif more or what not in ("status", "restart", "stop"):
            raise WorkbookError(
                f"%ranks {line.strip()}: write a number of ranks (and cuda, to use GPUs), or status, "
                "restart or stop."
            )
        elif what == "restart":
            self._running().restart()
        elif self._ranks is not None and what == "status":
            table = Table("rank", "process", "device", "memory", "variables", box=None)
            for rank, (pid, device, held, names) in self._ranks.status().items():
                table.add_row(str(rank), str(pid), device, show_bytes(held), ", ".join(names))
            display(table)
            return
        elif self._ranks is not None:
            self.stop()
            print("The ranks have stopped.")
            return
        print(self._state())

    @cell_magic("ranks")  # type: ignore[arg-type]
    def on_all(self, line: str, cell: str) -> None:
        """Run the cell on all ranks."""
        rest = line.replace(TIMELINE, "").strip()
        if rest:
            raise WorkbookError(f"%%ranks {rest}: for some of the ranks write %%rank, as in %%rank 0,2.")
        self._run(cell, None, TIMELINE in line)

    @cell_magic("rank")  # type: ignore[arg-type]
    def on_some(self, line: str, cell: str) -> None:
        """Run the cell on some ranks, such as 0 or 0,2."""
        self._run(cell, parse_ranks(line.replace(TIMELINE, "")), TIMELINE in line)

    def push(self, *, ranks: Iterable[int] | None = None, **values: Any) -> None:
        """Set variables on all ranks, or on the given ones: push(x=1)."""
        self._running().push(ranks, **values)

    def pull(self, name: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return the value of a variable, or of an expression, by rank."""
        return self._running().pull(name, ranks)

    def stop(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.stop()
        self._ranks = None

    def _running(self) -> StandingRanks:
        if self._ranks is None:
            self._ranks = StandingRanks(DEFAULT_RANKS)
            print(self._state())
        return self._ranks

    def _state(self) -> str:
        if self._ranks is None:
            return "No ranks are running. %ranks 4 starts four."
        size = self._ranks.world_size
        return f"{size} ranks are running." if size > 1 else "1 rank is running."

    def _run(self, cell: str, ranks: list[int] | None, record: bool) -> None:
        assert self.shell is not None
        replies = self._running().run(cell, ranks, f"<cell {self.shell.execution_count}>", record)
        if failed := {rank: reply for rank, reply in replies.items() if reply.error}:
            first = min(failed)
            others = [f"rank {rank}: {reply.error}" for rank, reply in failed.items() if rank != first]
            text = f"rank {first} failed:\n{failed[first].traceback}"
            raise WorkbookError("\n".join([text.rstrip(), *others]))
        shown = {rank: reply.shown for rank, reply in replies.items() if reply.shown is not None}
        if shown:
            display(Values(shown))
        if record:
            self._draw(replies)

    def _draw(self, replies: dict[int, Reply]) -> None:
        events = [event for reply in replies.values() for event in reply.events]
        if not events:
            print("Nothing was recorded: collectives of comm and `with lab.trace.timeline.span(...)` are.")
            return
        from lab.notebook.picture import show_events  # takes half a second

        kinds = ", ".join(dict.fromkeys(event.kind for event in events))
        show_events(events, alt=f"Timeline of this cell on {name_of(list(replies))}: {kinds}.")


def parse_ranks(text: str) -> list[int]:
    """Return the ranks in "0" or "0,2". Raise WorkbookError for other texts."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise WorkbookError(f"%%rank {text}: write ranks such as 0 or 0,2.")
    return [int(part) for part in parts]

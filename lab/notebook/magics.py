"""Run the cells of a notebook on ranks that stay: an extension of IPython, for JupyterLab and the terminal.

      %load_ext lab.notebook
      %ranks 4                      start four ranks; %ranks 2 cuda spreads them over this machine's GPUs
      %ranks status                 show each rank's process, device, memory and variables
      %ranks times                  show how long the last cells took on each rank
      %ranks restart                start them again, without their variables; %ranks stop ends them

      %%ranks                       run this cell on all ranks; variables stay from cell to cell
      x = torch.ones(2) * rank
      dist.all_reduce(x)
      x                             the value on each rank is shown; equal values are shown once

      %%rank 0,2                    run this cell on ranks 0 and 2
      %%ranks --timeline            and draw the spans that lab.trace.timeline has recorded in it

      %ranks everywhere             from now on, run each cell without a magic on all ranks;
      %%here                        but this cell in the notebook's own process; %ranks here ends that

      pull("x")                     {0: tensor([6., 6.]), 1: ...} in the notebook's own process
      push(lr=0.1)                  set a variable on all ranks

The stop button ends a cell within two seconds, also in a deadlock, and says where each rank was.
"""

import atexit
import html
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.display import HTML, display
from rich.table import Table

from lab.launch.errors import WorkbookError
from lab.ranks import forked
from lab.ranks.cells import Reply
from lab.ranks.output import is_in_a_notebook, print_tagged
from lab.ranks.standing import StandingRanks
from lab.units import show_bytes, show_seconds

DEFAULT_RANKS = 4
KEPT_TIMES = 20  # cells
TIMELINE = "--timeline"
LIVE_LINES = 40  # of a cell in a notebook are shown as they come; a longer output is collapsed, by rank
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


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return rows of texts below their heads."""
    made = Table(*heads, box=None)
    for row in rows:
        made.add_row(*map(str, row))
    return made


def name_of(ranks: Sequence[int]) -> str:
    """Return "rank 0" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@magics_class
class RanksMagics(Magics):
    """The magic commands, and the ranks that they have started."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._ranks: StandingRanks | None = None
        self._output = CellOutput()
        # The number and the first line of each cell, and the seconds that it took by rank.
        self._times: deque[tuple[int, str, dict[int, float]]] = deque(maxlen=KEPT_TIMES)
        self._is_everywhere = False

    @line_magic("ranks")  # type: ignore[arg-type]
    def manage(self, line: str) -> None:
        """Start ranks (%ranks 4), or restart, stop or show them: see lab/notebook/magics.py."""
        what, *more = line.split() or ["status"]
        if what.isdecimal() and int(what) and more in ([], ["cpu"], ["cuda"]):
            new = StandingRanks(int(what), self._output.show, *more)
            self.stop()
            self._ranks = new
        elif what in ("everywhere", "here") and not more:
            self._is_everywhere = what == "everywhere"
        elif what == "times" and not more:
            self._show_times()
            return
        elif what == "status" and not more and self._ranks is not None:
            self._show_status(self._ranks)
            return
        elif what == "stop" and not more and self._ranks is not None:
            self.stop()
            print("The ranks have stopped.")
            return
        elif what == "restart" and not more:
            self._running().restart()
        elif what not in ("status", "stop") or more:
            raise WorkbookError(
                f"%ranks {line.strip()}: write a number of ranks (and cuda, to use GPUs), or status, times, "
                "restart, stop, everywhere or here."
            )
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
        """Run the cell on some ranks, such as 0 or 0,2 or 1-3."""
        self._run(cell, parse_ranks(line.replace(TIMELINE, "")), TIMELINE in line)

    def send_everywhere(self, lines: list[str]) -> list[str]:
        """Return the lines of a cell as IPython should run them: see `%ranks everywhere` and `%%here`."""
        first = next((line.strip() for line in lines if line.strip()), "")
        if first == "%%here":
            return lines[lines.index(next(line for line in lines if line.strip())) + 1 :]
        is_plain = bool(first) and not first.startswith(("%", "!", "?"))
        return ["%%ranks\n", *lines] if self._is_everywhere and is_plain else lines

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

    @context_matcher(identifier="ranks")
    def complete(self, context: CompletionContext) -> SimpleMatcherResult:
        """Complete the names of the ranks' variables in cells that run there."""
        is_theirs = self._is_everywhere or context.full_text.lstrip().startswith("%%rank")
        fitting = self._ranks.completed(context.token) if is_theirs and self._ranks is not None else []
        return SimpleMatcherResult(completions=[SimpleCompletion(text=name) for name in fitting])

    def _running(self) -> StandingRanks:
        if self._ranks is None:
            self._ranks = StandingRanks(DEFAULT_RANKS, self._output.show)
            print(self._state())
        return self._ranks

    def _state(self) -> str:
        if self._ranks is None:
            return "No ranks are running. %ranks 4 starts four."
        cells = " Each cell without a magic runs on all of them." if self._is_everywhere else ""
        size = self._ranks.world_size
        return f"{size} ranks are running.{cells}" if size > 1 else f"1 rank is running.{cells}"

    def _show_status(self, ranks: StandingRanks) -> None:
        rows = [
            (rank, pid, device, show_bytes(held), ", ".join(names))
            for rank, (pid, device, held, names) in ranks.status().items()
        ]
        display(table(("rank", "process", "device", "memory", "variables"), rows))

    def _show_times(self) -> None:
        ranks = sorted({rank for _, _, seconds in self._times for rank in seconds})
        rows = [
            (cell, *(show_seconds(taken[rank]) if rank in taken else "" for rank in ranks), source)
            for cell, source, taken in self._times
        ]
        display(table(("cell", *(f"rank {rank}" for rank in ranks), "begins with"), rows))

    def _run(self, cell: str, ranks: list[int] | None, record: bool) -> None:
        assert self.shell is not None
        number = self.shell.execution_count
        try:
            replies = self._running().run(cell, ranks, f"<cell {number}>", record)
        finally:
            self._output.finish()
        begin = next((line for line in cell.splitlines() if line.strip()), "")
        self._times.append((number, begin[:60], {rank: reply.seconds for rank, reply in replies.items()}))
        self._raise_error(replies)
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

    def _raise_error(self, replies: dict[int, Reply]) -> None:
        failed = {rank: reply for rank, reply in replies.items() if reply.error}
        if failed:
            first = min(failed)
            others = [f"rank {rank}: {reply.error}" for rank, reply in failed.items() if rank != first]
            text = f"rank {first} failed:\n{failed[first].traceback}"
            raise WorkbookError("\n".join([text.rstrip(), *others]))


def parse_ranks(text: str) -> list[int]:
    """Return the ranks in "0", "0,2" or "1-3". Raise WorkbookError for other texts."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise WorkbookError(f"%%rank {text}: write ranks such as 0 or 0,2 or 1-3.")
        ranks += range(int(first), int(last if dash else first) + 1)
    return ranks


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magic commands, `push` and `pull`, and begin to import torch for the ranks."""
    forked.warm_up()
    magics = RanksMagics(shell)
    shell.register_magics(magics)
    shell.input_transformers_cleanup.append(magics.send_everywhere)
    shell.push({"push": magics.push, "pull": magics.pull})
    if shell.Completer is not None:
        shell.Completer.custom_matchers.append(magics.complete)
    atexit.register(magics.stop)

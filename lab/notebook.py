"""Run the cells of a notebook on ranks that stay: an extension of IPython, for JupyterLab and the terminal.

      %load_ext lab.notebook
      %ranks 4                      start four ranks; also: restart, stop, status

      %%ranks                       run this cell on all ranks; variables stay from cell to cell
      x = torch.ones(2) * rank
      dist.all_reduce(x)
      x                             the value on each rank is shown; equal values are shown once

      %%rank 0,2                    run this cell on ranks 0 and 2

      pull("x")                     {0: tensor([6., 6.]), 1: ...} in the notebook's own process
      push(lr=0.1)                  set a variable on all ranks

The stop button ends a cell within two seconds, also in a deadlock, and says where each rank was.
"""

import atexit
import html
from collections.abc import Iterable
from typing import Any, TextIO

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import HTML, display

from lab import forked
from lab.errors import WorkbookError
from lab.rank_cells import Reply
from lab.rank_output import is_in_a_notebook, print_tagged
from lab.standing_ranks import Interrupted, StandingRanks

LIVE_LINES = 40  # of a cell in a notebook are shown as they come; a longer output is collapsed, by rank
DEFAULT_RANKS = 4


class CellError(Exception):
    """An error of a cell on the ranks. IPython shows its text without a traceback of this process."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class Values:
    """The values of a cell's last expression by rank, as text and as a table."""

    def __init__(self, by_rank: dict[int, str]) -> None:
        self._groups: dict[str, list[int]] = {}
        for rank, text in by_rank.items():
            self._groups.setdefault(text, []).append(rank)

    def __repr__(self) -> str:
        blocks = []
        for text, ranks in self._groups.items():
            separator = "\n" if "\n" in text else " "
            blocks.append(f"{_name(ranks)}:{separator}{text}")
        return "\n".join(blocks)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th style='text-align:left'>{_name(ranks)}</th>" for ranks in self._groups.values())
        cells = "".join(
            f"<td style='text-align:left;vertical-align:top'><pre>{html.escape(text)}</pre></td>"
            for text in self._groups
        )
        return f"<table><tr>{heads}</tr><tr>{cells}</tr></table>"


@magics_class
class RanksMagics(Magics):
    """The magic commands, and the ranks that they have started."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._ranks: StandingRanks | None = None
        self._lines: list[tuple[int, str]] = []
        self._known: list[str] = []

    @line_magic("ranks")  # type: ignore[arg-type]
    def manage(self, line: str) -> None:
        """Start ranks (%ranks 4), or restart, stop, or show them (%ranks status)."""
        what = line.strip() or "status"
        if what == "stop":
            self.stop()
        elif what == "restart":
            self._running().restart()
            self._known = []
        elif what != "status":
            if not what.isdecimal() or int(what) < 1:
                raise CellError(f"%ranks {what}: write a number of ranks, or restart, stop or status.")
            self.stop()
            self._ranks = StandingRanks(int(what), self._show)
        print(self._status(with_processes=what == "status"))

    @cell_magic("ranks")  # type: ignore[arg-type]
    def on_all(self, line: str, cell: str) -> None:
        """Run the cell on all ranks."""
        if line.strip():
            raise CellError(f"%%ranks {line.strip()}: for some of the ranks write %%rank, as in %%rank 0,2.")
        self._run(cell, None)

    @magic_arguments()
    @argument("ranks", help="the ranks, such as 0 or 0,2 or 1-3")
    @cell_magic("rank")  # type: ignore[arg-type]
    def on_some(self, line: str, cell: str) -> None:
        """Run the cell on some ranks."""
        self._run(cell, parse_ranks(parse_argstring(self.on_some, line).ranks))

    def push(self, *, ranks: Iterable[int] | None = None, **values: Any) -> None:
        """Set variables on all ranks, or on the given ones: push(x=1)."""
        self._running().push(ranks, **values)

    def pull(self, name: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return the value of a variable, or of an expression, by rank."""
        try:
            return self._running().pull(name, ranks)
        except WorkbookError as error:
            raise CellError(str(error)) from None

    def stop(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.stop()
        self._ranks, self._known = None, []

    @context_matcher(identifier="ranks")
    def complete(self, context: CompletionContext) -> SimpleMatcherResult:
        """Complete the names of the ranks' variables in cells that run there."""
        begun = context.token
        is_theirs = context.full_text.lstrip().startswith("%%rank")
        fitting = [name for name in self._known if name.startswith(begun)] if is_theirs else []
        return SimpleMatcherResult(completions=[SimpleCompletion(text=name) for name in fitting])

    def _running(self) -> StandingRanks:
        if self._ranks is None:
            self._ranks = StandingRanks(DEFAULT_RANKS, self._show)
            print(self._status(with_processes=False))
        return self._ranks

    def _status(self, with_processes: bool) -> str:
        if self._ranks is None:
            return "No ranks are running. %ranks 4 starts four."
        processes = f" (processes {', '.join(map(str, self._ranks.pids))})" if with_processes else ""
        return f"{self._ranks.world_size} ranks are running{processes}."

    def _run(self, cell: str, ranks: list[int] | None) -> None:
        self._lines = []
        assert self.shell is not None
        try:
            replies = self._running().run(cell, ranks, f"<cell {self.shell.execution_count}>")
        except (Interrupted, WorkbookError) as error:
            raise CellError(str(error)) from None
        finally:
            self._show_rest()
        self._raise_error(replies)
        shown = {rank: reply.shown for rank, reply in replies.items() if reply.shown is not None}
        if shown:
            display(Values(shown))
        first = min(replies)
        self._known = self._running().names() if first == 0 else self._known

    def _raise_error(self, replies: dict[int, Reply]) -> None:
        failed = {rank: reply for rank, reply in replies.items() if reply.error}
        if failed:
            first = min(failed)
            others = [f"rank {rank}: {reply.error}" for rank, reply in failed.items() if rank != first]
            text = f"rank {first} failed:\n{failed[first].traceback}"
            raise CellError("\n".join([text.rstrip(), *others]))

    def _show(self, rank: int, line: str, stream: TextIO) -> None:
        self._lines.append((rank, line))
        if len(self._lines) <= LIVE_LINES or not is_in_a_notebook():
            print_tagged(rank, line, stream)

    def _show_rest(self) -> None:
        """Show an output that was too long to be shown as it came: one collapsed block for each rank."""
        if len(self._lines) <= LIVE_LINES or not is_in_a_notebook():
            return
        for rank in sorted({rank for rank, _ in self._lines}):
            own = [line for r, line in self._lines if r == rank]
            summary = f"<summary>rank {rank}: {len(own)} lines</summary>"
            text = html.escape("\n".join(own))
            display(HTML(f"<details>{summary}<pre>{text}</pre></details>"))


def parse_ranks(text: str) -> list[int]:
    """Return the ranks in "0", "0,2" or "1-3". Raise CellError for other texts."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise CellError(f"%%rank {text}: write ranks such as 0 or 0,2 or 1-3.")
        ranks += range(int(first), int(last if dash else first) + 1)
    return ranks


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magic commands, `push` and `pull`, and begin to import torch for the ranks."""
    forked.keep_spares(DEFAULT_RANKS)
    forked.warm_up()
    magics = RanksMagics(shell)
    shell.register_magics(magics)
    shell.push({"push": magics.push, "pull": magics.pull})
    if shell.Completer is not None:
        shell.Completer.custom_matchers.append(magics.complete)
    atexit.register(magics.stop)


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

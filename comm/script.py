"""Start and end the script of a lesson: `start(main, Args)`.

The ranks meet before they read the command line. So if all ranks refuse an argument, rank 0 alone prints the
error.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TypeVar

import torch
import tyro

from comm.membership import liveness
from comm.rendezvous import join, leave
from comm.wire.wire import is_lost_connection
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError, reason
from lab.launch.launcher import run_in_a_child
from lab.launch.usage import print_help_if_asked

Arguments = TypeVar("Arguments")


class Usage(WorkbookError):
    """The text that a script prints instead of running: its help, or an error in its command line."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def start(
    main: Callable[[Cluster, Arguments], object],
    arguments: type[Arguments],
    read: Callable[[Sequence[str], Cluster], Arguments] | None = None,
    in_a_child: bool = False,
) -> None:
    """Join the other ranks, read the command line, call `main(cluster, arguments)`, and leave together.

    `read(words, cluster)` reads the command line in place of `command_line`. With `in_a_child` torchrun does
    not notice if the rank is killed (lab/launch/launcher.py).
    """
    if print_help_if_asked(sys.argv[1:], arguments, f"python {sys.argv[0]}"):
        return
    if in_a_child:
        run_in_a_child()
    with joined() as cluster:
        main(cluster, command_line(arguments) if read is None else read(sys.argv[1:], cluster))


@contextmanager
def joined() -> Iterator[Cluster]:
    """Join the other ranks for a `with` block, and leave them at its end.

    A WorkbookError is printed as one line, and the process exits with the error's code. If all ranks raise
    the same one, rank 0 alone prints it, unless it `concerns_all`.
    """
    try:
        cluster = join()
        yield cluster
    except WorkbookError as error:
        sentence = str(error)
        lost = is_lost_connection(str(error.__cause__)) and liveness.cause()
        if lost and str(lost) not in sentence:
            sentence += f" ({lost})"
        _exit(sentence, error.exit_code, sentence if isinstance(error, Usage) else None, error.concerns_all)
    except KeyboardInterrupt:
        _exit("interrupted.", 130)
    except BaseException as error:
        if _is_out_of_memory(error):
            _exit(f"there is not enough memory ({reason(error)}); take a smaller batch or model.", 1)
        # PyTorch's own techniques (DDP, FSDP) communicate without comm, so their errors are torch's.
        if isinstance(error, RuntimeError) and is_lost_connection(str(error)) and (gone := liveness.cause()):
            _exit(f"a peer has closed its connection: {gone}.", 1)
        timeouts = ("Timed out waiting", "Connect timeout")  # of gloo
        if isinstance(error, RuntimeError) and any(text in str(error) for text in timeouts):
            _exit("another rank has not answered within OP_TIMEOUT: look for one that is stuck or paused.", 1)
        liveness.fail(f"{type(error).__name__}: {error}".partition("\n")[0], patience=0.0)
        error.add_note(f"This was on rank {os.environ.get('RANK', '0')}.")
        raise
    leave(cluster)


def command_line(arguments: type[Arguments]) -> Arguments:
    """Return the script's arguments. Raise Usage, and print nothing, where tyro would exit."""
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            # tyro's errors end in `prog` and --help, which should run as they are printed.
            return tyro.cli(arguments, prog=f"python {sys.argv[0]}")
    except SystemExit as end:
        raise Usage(said.getvalue().replace(" --help", " --help-all"), int(end.code or 0)) from None


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed. For a CPU torch has no error class for that."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _exit(sentence: str, exit_code: int, usage: str | None = None, concerns_all: bool = False) -> None:
    if not liveness.fail(sentence) or concerns_all:
        line = usage or f"rank {os.environ.get('RANK', '0')}: {sentence}\n"
        print(line, end="", file=sys.stderr if exit_code else sys.stdout, flush=True)
    liveness.wait_for_the_others(1.0)
    sys.stdout.flush()
    # Not sys.exit: the destructors of a broken group would wait for peers that have gone.
    os._exit(exit_code)

"""Start and end a script: `start(main, Args)`.

The command line is read before the ranks meet, and what the arguments mean together is checked after it. So
if all ranks refuse them, rank 0 alone prints the error.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from comm.membership import liveness
from comm.rendezvous import join, leave
from comm.wire.groups import is_lost_connection
from lab.cluster import Cluster
from lab.launch.ending import abandon
from lab.launch.errors import UsageError, WorkbookError, reason
from lab.launch.launcher import run_in_a_child
from lab.launch.usage import is_told_by_rank_0, print_help_if_asked, read_words

Arguments = TypeVar("Arguments")


def start(
    main: Callable[[Cluster, Arguments], object],
    arguments: type[Arguments],
    read: Callable[[Sequence[str], Cluster], Arguments] | None = None,
    in_a_child: bool = False,
) -> None:
    """Read the command line, join the other ranks, call `main(cluster, arguments)`, and leave together.

    `read(words, cluster)` reads the command line after the ranks have met. With `in_a_child` torchrun does
    not notice if the rank is killed, and `args.come_back` may say that it is started again
    (lab/launch/launcher.py).
    """
    words = sys.argv[1:]
    if print_help_if_asked(words, arguments, f"python {sys.argv[0]}"):
        return
    try:
        args = None if read else read_words(words, arguments)
    except UsageError as error:
        if is_told_by_rank_0():
            return  # after an exit code torchrun ends all ranks, perhaps before rank 0 has told the user
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    if in_a_child:
        run_in_a_child(getattr(args, "come_back", None))
    with joined() as cluster:
        main(cluster, read(words, cluster) if read else args)  # type: ignore[arg-type]


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
        _exit(sentence, error.exit_code, error.concerns_all)
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
        abandon()
        liveness.fail(f"{type(error).__name__}: {error}".partition("\n")[0], patience=0.0)
        error.add_note(f"This was on rank {os.environ.get('RANK', '0')}.")
        raise
    leave(cluster)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed. For a CPU torch has no error class for that."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _exit(sentence: str, exit_code: int, concerns_all: bool = False) -> None:
    if not liveness.fail(sentence) or concerns_all:
        line = f"rank {os.environ.get('RANK', '0')}: {sentence}"
        print(line, file=sys.stderr if exit_code else sys.stdout, flush=True)
    liveness.wait_for_the_others(1.0)
    sys.stdout.flush()
    # Not sys.exit: the destructors of a broken group would wait for peers that have gone.
    os._exit(exit_code)

"""torchrun for `make run`: the same launcher, but it lets the ranks have the last word.

torchrun itself answers a rank's one sentence with thirty lines of its own traceback, and after Ctrl-C it
waits half a minute for a rank that sits in a collective and cannot notice. Its store is open to the network
(lab.local_rendezvous says how this one's is not), and each run leaves a folder in the temporary directory.
"""

import logging
import os
import signal
import sys
from types import FrameType


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, _interrupt)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from lab import launcher, local_rendezvous

    os.environ[launcher.PID] = str(os.getpid())
    logging.disable(logging.ERROR)
    options = ["--signals-to-handle=SIGTERM,SIGHUP,SIGQUIT", f"--log-dir={os.devnull}"]
    try:
        run.main([*options, *local_rendezvous.register(), *argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = (
            f"ended with exit code {failure.exitcode}"
            if failure.exitcode > 0
            else f"was killed by {signal.Signals(-failure.exitcode).name}"
        )
        print(f"rank {rank} {how}; the others were stopped.", file=sys.stderr)
        return 1
    except SignalException as stop:
        print("stopped all ranks.", file=sys.stderr)
        return 128 + stop.sigval
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Turn Ctrl-C into SIGTERM, which also ends a rank inside gloo; only the first, to clear up in peace."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

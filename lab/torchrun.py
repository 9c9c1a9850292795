"""Run torchrun for `make run`, but without its own traceback, and with a quick end at Ctrl-C.

After a rank's one-line error torchrun itself prints thirty lines of its own traceback. After Ctrl-C it waits
half a minute for a rank inside a collective, which cannot react. Its store is open to the network, unlike the
one here (lab.local_rendezvous). And each of its runs leaves a folder in the temporary directory.
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
    """Turn the first Ctrl-C into SIGTERM, which also ends a rank inside gloo, and ignore further ones."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

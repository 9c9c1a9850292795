"""Run torchrun, but without its own traceback, with a quick end at Ctrl-C, and with SIGUSR1 for all ranks.

After a rank's one-line error torchrun prints thirty lines of its own traceback, and ends with code 1 instead
of the rank's. After Ctrl-C it waits half a minute for a rank inside a collective. SIGUSR1, by which a
scheduler asks for a checkpoint (lab/launch/interrupt.py), kills it.
"""

import logging
import os
import signal
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

from lab.launch.errors import Stopped, UsageError, WorkbookError, reason
from lab.launch.interrupt import FROM_SCHEDULER

REPEAT_SECONDS = 5
ADDRESS = "127.0.0.1"


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, _interrupt)
    _pass_stop_requests_on()
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from lab.launch import launcher
    from lab.launch.torch_log import hide_torch_warnings

    hide_torch_warnings()  # such as those of a machine that leaves after the one that has the store
    os.environ[launcher.PID] = str(os.getpid())
    logging.disable(logging.ERROR)
    options = [f"--signals-to-handle={','.join(_signals_to_handle())}", f"--log-dir={os.devnull}"]
    try:
        is_local = not any(argument.startswith(("--nnodes", "--rdzv")) for argument in argv)
        run.main([*options, *(_local_rendezvous() if is_local else []), *argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said_why = WorkbookError.exit_code, UsageError.exit_code, Stopped.BY_SCHEDULER, Stopped.BY_USER
        if failure.exitcode in said_why:
            return failure.exitcode
        if failure.exitcode > 0:
            how = f"a rank ended with exit code {failure.exitcode}"
        else:
            how = f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}"
        print(f"{how}; the others were stopped.", file=sys.stderr)
        return max(failure.exitcode, 1)
    except DistError as error:
        print(
            f"The machines do not meet ({reason(error).rstrip('.')}); start all of them with the "
            "address and a free port of machine 0.",
            file=sys.stderr,
        )
        return 1
    except SignalException as stop:
        print("stopped all ranks.", file=sys.stderr)
        return 128 + stop.sigval
    return 0


def _local_rendezvous() -> list[str]:
    """Register a rendezvous of this launcher alone, whose store listens on 127.0.0.1; return its options.

    torch's own (`torchrun --standalone`) opens its store on all interfaces, and unpickles a state from it.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    from lab.launch.interface import open_store

    class LocalRendezvous(StaticTCPRendezvous):
        def __init__(self, given: RendezvousParameters) -> None:
            store = open_store(ADDRESS, 0, timedelta(minutes=1))
            super().__init__(ADDRESS, store.port, rank=0, world_size=1, run_id=given.run_id, timeout=60)
            self._store = store

        def get_backend(self) -> str:
            return "local"

    rendezvous_handler_registry.register("local", LocalRendezvous)
    # Port 0 means any free port, so that two jobs can run at the same time.
    return ["--rdzv-backend=local", f"--rdzv-endpoint={ADDRESS}:0", f"--rdzv-id={uuid.uuid4()}"]


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Turn the first Ctrl-C into SIGTERM, which also ends a rank inside gloo, and ignore further ones."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


def _signals_to_handle() -> list[str]:
    """Return the signals that end all ranks, without those that nohup or a shell has switched off."""
    names = [name for name in ("SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    return ["SIGTERM", *(name for name in names if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN)]


def _pass_stop_requests_on() -> None:
    """Send a SIGUSR1 that this process receives to all ranks.

    Ranks inherit that it is blocked: one that arrives while a rank imports torch waits for its StopRequest.
    """
    if FROM_SCHEDULER:
        signal.pthread_sigmask(signal.SIG_BLOCK, [FROM_SCHEDULER])
        threading.Thread(target=_wait_for_stop_requests, daemon=True).start()


def _wait_for_stop_requests() -> None:
    signal.sigwait([signal.SIGUSR1])
    while True:  # the ranks may not have started yet; a rank ignores all but the first
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(REPEAT_SECONDS)


def _children() -> list[int]:
    """Return the ids of this process's children, on Linux."""
    children = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children += [int(pid) for pid in file.read_text().split()]
    return children


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run one rank in a process that `lab.ranks` has started. The forkserver preloads this file."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from lab import replace
from lab.cluster import Cluster
from lab.launch.devices import device_of
from lab.launch.ending import complete
from lab.launch.gloo_threads import keep_from_preempting
from lab.launch.interface import LOOPBACK
from lab.ranks import stacks

READY = b"The group is formed."  # from a rank to its parent, before it calls its function
INTERRUPT = b"End what you do."  # from a parent to its rank


@dataclass(frozen=True)
class Job:
    """Everything that a rank needs to start."""

    rank: int
    world_size: int
    folder: str
    backend: str | None
    device: str
    group_timeout: float
    work: bytes
    path: list[str]
    working_directory: str
    stays: bool = False  # the function gets the Parent, too, and answers its requests
    describe: Callable[[BaseException], Any] | None = None  # what RankError.described has of a failure


class Parent:
    """Serve the parent from a thread: say where this rank is, keep its requests, and end with it."""

    def __init__(self, pipe: Connection, job: Job) -> None:
        self.pipe, self._job = pipe, job
        self.requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.interrupt: Callable[[], None] = lambda: None  # ends what the main thread does
        threading.Thread(target=self._serve, name="serve the parent", daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self.pipe.recv_bytes()
                if message == stacks.ASK:
                    stacks.answer(self._job.folder, self._job.rank)
                elif message == INTERRUPT:
                    threading.Thread(target=self.interrupt, daemon=True).start()
                else:
                    self.requests.put(message)
        shutil.rmtree(self._job.folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def rank_main(job: Job, pipe: Connection, out: Connection, err: Connection) -> None:
    """Form the group, call the function, send back its result or its traceback."""
    # A daemon must not start processes, and a DataLoader's workers are some.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    gc.freeze()  # imported modules are no garbage, so the collector should not search them each time
    os.setpgid(0, 0)
    for stream, fd in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), fd)
        stream.close()
    os.dup2(
        os.open(os.devnull, os.O_RDONLY), 0
    )  # reading a terminal would stop a rank: it is in the background
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    parent = Parent(pipe, job)
    sys.path[:] = job.path
    os.chdir(job.working_directory)
    faulthandler.register(signal.SIGUSR2)  # prints where this rank is
    failed = False
    try:
        reply = cloudpickle.dumps((time.monotonic(), _call(job, parent), None))
    except BaseException as error:
        failed, reply = True, _failure(error, job)
    _finish_output()
    pipe.send_bytes(reply)
    if failed:
        # End like a crashed process: connections close, and no destructor waits for peers.
        os._exit(1)
    while True:  # until the parent ends this process: peers may still read from its connections
        signal.pause()


def _call(job: Job, parent: Parent) -> Any:
    fn: Callable[..., Any]
    fn, args, replacements = cloudpickle.loads(job.work)
    device = device_of(job.rank, job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(os.path.join(job.folder, "store"), job.world_size)
    cluster = Cluster(job.rank, job.world_size, job.rank, device, dist.PrefixStore("run_ranks", store))
    if job.backend is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # several communicators may run at once
        form_group(job.backend, dist.PrefixStore("group", store), job.rank, job.world_size, job.group_timeout)
        # Wait for all: if a rank failed while a peer is still connecting, the peer's error would hide the
        # cause.
        dist.barrier(device_ids=[device.index] if "nccl" in job.backend else None)
    parent.pipe.send_bytes(READY)
    with replace.apply(replacements):
        result = fn(cluster, *args, parent) if job.stays else fn(cluster, *args)
    complete()
    return result


def form_group(backend: str, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
    """Form the group of all ranks; an operation may take `timeout` seconds."""
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    keep_from_preempting()


def _finish_output() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


def _failure(error: BaseException, job: Job) -> bytes:
    now = time.monotonic()
    try:
        described = job.describe(error) if job.describe else None
        return cloudpickle.dumps((now, described, trace_of(error, __file__)))
    except Exception:
        return cloudpickle.dumps((now, None, "".join(traceback.format_exception(error))))


def trace_of(error: BaseException, file: str) -> traceback.TracebackException:
    """Return the traceback of an error without this file's own frames."""
    # The parent looks up source lines, because only it knows the cells of a notebook.
    trace = traceback.TracebackException.from_exception(error, lookup_lines=False, compact=True)
    link: traceback.TracebackException | None = trace
    while link is not None:
        link.stack[:] = [frame for frame in link.stack if frame.filename != file]
        link = link.__cause__ or link.__context__
    return trace

"""Run one rank in a process that `lab.ranks` has started. The forkserver preloads this file."""

import contextlib
import faulthandler
import gc
import os
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
from lab.launch.gloo_threads import keep_from_preempting
from lab.launch.interface import LOOPBACK
from lab.ranks import stacks
from lab.ranks.compared import compared_in


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


def rank_main(job: Job, pipe: Connection, out: Connection, err: Connection) -> None:
    """Form the group, call the function, send back its result or its traceback."""
    gc.freeze()  # imported modules are no garbage, so the collector should not search them each time
    os.setpgid(0, 0)
    for stream, fd in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), fd)
        stream.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    _serve_the_parent(pipe, job)
    sys.path[:] = job.path
    os.chdir(job.working_directory)
    with open(stacks.stack_file(job.folder, job.rank), "a") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        failed = False
        try:
            reply = cloudpickle.dumps((time.monotonic(), _call(job), None))
        except BaseException as error:
            failed, reply = True, _failure(error)
        _finish_output()
        pipe.send_bytes(reply)
        if failed:
            # End like a crashed process: connections close, and no destructor waits for peers.
            os._exit(1)
        while True:  # until the parent ends this process: peers may still read from its connections
            signal.pause()


def _call(job: Job) -> Any:
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
        form_group(job.backend, dist.PrefixStore("group", store), job.rank, job.world_size, job.group_timeout)
        # Wait for all: if a rank failed while a peer is still connecting, the peer's error would hide the
        # cause.
        dist.barrier(device_ids=[device.index] if "nccl" in job.backend else None)
    with replace.apply(replacements):
        return fn(cluster, *args)


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


def _failure(error: BaseException) -> bytes:
    # The parent looks up source lines, because only it knows the cells of a notebook.
    trace = traceback.TracebackException.from_exception(error, lookup_lines=False, compact=True)
    link: traceback.TracebackException | None = trace
    while link is not None:
        link.stack[:] = [frame for frame in link.stack if frame.filename != __file__]
        link = link.__cause__ or link.__context__
    now = time.monotonic()
    try:
        return cloudpickle.dumps((now, compared_in(error), trace))
    except Exception:
        return cloudpickle.dumps((now, None, "".join(traceback.format_exception(error))))


def _serve_the_parent(parent: Connection, job: Job) -> None:
    """Start a thread that says where this rank is, and that ends the rank with its parent."""

    def serve() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                parent.recv_bytes()  # stacks.ASK
                stacks.answer(job.folder, job.rank)
        shutil.rmtree(job.folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=serve, name="serve the parent", daemon=True).start()

"""Record what every rank did and when, on one clock: spans, for Perfetto or as a picture.

    start_recording()
    with span("forward", kind="forward", microbatch=3):
        ...
    record("bucket 0", "communication", started_ns, ended_ns, lane="communication")
    save(cluster, "runs/overlap")      # on every rank; rank 0 writes trace.json and timeline.png

    rank 0         |  forward  |      backward      | step |
    communication              | bucket 0 | bucket 1 |
    rank 1         |  forward  |      backward      | step |
    ...

Times are nanoseconds of `now`. A span tells when its block's work was done: on a GPU its ends are marks in
the stream (lab.stream_clock). Offsets between machines are found as NTP does (RFC 5905, section 8): the
fastest of many round trips tells most, and half of its delay bounds the error.
"""

import json
import platform
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.chrome_trace import write_chrome_trace
from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.gantt import MAIN_LANE, Event, draw
from lab.stream_clock import StreamClock

Moment = int | torch.cuda.Event  # nanoseconds of `now`, or a mark in a GPU's stream

# Monotonic: no NTP daemon ever sets it back within a span. All processes of one machine share it, containers
# too; machines that booted at different times do not, and `align` makes up for that.
now = time.perf_counter_ns

QUICK_NS = 2_000_000  # of looks at the store one after the other, many round trips
PIECE_BYTES = 1 << 20  # a TCPStore hangs up on a client that sends a value above 8 MiB

_recording = False
_events: list[Event] = []  # threads append without a lock: list.append is atomic
_unread: deque[tuple[Moment, Moment, Callable[[int, int], Event]]] = deque()  # those with a mark
_clock: StreamClock | None = None
_NOTHING = nullcontext()


def start_recording(device: torch.device | None = None) -> None:
    """Forget what was recorded and record from here on, on the clock of `device` where that is a GPU.

    Call `settle()` after each step then, or thousands of CUDA events pile up.
    """
    global _recording, _clock
    _events.clear()
    _unread.clear()
    _clock = StreamClock(device) if device is not None and device.type == "cuda" else None
    _recording = True


def stop_recording() -> None:
    """Record nothing more. What is recorded stays until the next start; spans still open are dropped."""
    global _recording
    _recording = False


def is_recording() -> bool:
    """Return whether spans are being recorded."""
    return _recording


def recorded() -> list[Event]:
    """Return this process's events so far, on its own clock; waits for the GPU where one is recorded."""
    settle()
    return list(_events)


def settle() -> None:
    """Wait for the GPU, if one is recorded, and read the marks of the spans so far."""
    if _clock is None or not (_recording or _unread):
        return
    while _unread:
        start, end, event = _unread.popleft()
        _events.append(event(_read(start), _read(end)))
    _clock.set_anchor()


def _read(moment: Moment) -> int:
    assert _clock is not None
    return moment if isinstance(moment, int) else _clock.read(moment)


def mark() -> Moment:
    """Return this moment, for `record`: `now()`, or on a GPU when the stream will have come so far.

    Threads that only communicate, and with the GPU's results in their hands, are on the host's clock.
    """
    return _clock.mark() if _recording and _clock is not None and _own_lane() == MAIN_LANE else now()


def span(name: str, kind: str = "compute", **args: Any) -> AbstractContextManager[None]:
    """Record the time the block takes, also if it raises; costs next to nothing while recording is off.

    `kind` chooses the colour (`lab.gantt.COLORS`), `args` show up in Perfetto, `lane=` is as in `record`.
    """
    return _Timed(name, kind, args) if _recording else _NOTHING


class _Timed:
    """A span around a block. A class, for a generator takes three times as long to enter and leave."""

    def __init__(self, name: str, kind: str, args: dict[str, Any]) -> None:
        self._name, self._kind, self._args = name, kind, args

    def __enter__(self) -> None:
        self._start = mark()

    def __exit__(self, *error: object) -> None:
        record(self._name, self._kind, self._start, mark(), **self._args)


def record(name: str, kind: str, start: Moment, end: Moment, *, lane: str | None = None, **args: Any) -> None:
    """Add a span whose start and end (`now()` or `mark()`) the caller has seen, perhaps on two threads.

    `lane` is the calling thread's unless given. Spans of one lane may overlap; they are shown side by side.
    """
    if not _recording:
        return
    lane = lane or _own_lane()

    def event(start_ns: int, end_ns: int) -> Event:
        return Event(name, kind, start_ns, max(0, end_ns - start_ns), lane, args)

    if isinstance(start, int) and isinstance(end, int):
        _events.append(event(start, end))
    else:
        _unread.append((start, end, event))


def _own_lane() -> str:
    """Return the calling thread's lane.

    Autograd runs a GPU's backward, hooks too, on a thread that is not Python's, and the main thread waits for
    it: what is done there is done in the main thread's time.
    """
    thread = threading.current_thread()
    is_autograds = isinstance(thread, threading._DummyThread) and torch._C._current_graph_task_id() != -1
    return MAIN_LANE if is_autograds or thread is threading.main_thread() else thread.name


def align(cluster: Cluster, rounds: int = 16, clock: Callable[[], int] = now) -> int:
    """Return the nanoseconds to add to this rank's `clock` to get rank 0's. Every rank must call it.

    Rank 0 serves the others in turn, `rounds` pings each. If a rank takes no part, the store's timeout ends
    the wait with a TimeoutError that names it; a store that is watched tells of its death at once.
    """
    store, prefix, machine = cluster.store, _fresh_prefix(cluster, "align"), _machine()
    if cluster.is_main:
        for rank in range(1, cluster.world_size):
            with _expecting(rank, "align", store):
                for i in range(rounds):
                    _wait(store, f"{prefix}/{rank}/{i}/ping", is_near=i > 0)
                    arrived = clock()
                    store.set(f"{prefix}/{rank}/{i}/pong", f"{arrived} {clock()} {machine}")
        return 0

    trips = []
    with _expecting(0, "align", store):
        for i in range(rounds):
            ping, pong = (f"{prefix}/{cluster.rank}/{i}/{ball}" for ball in ("ping", "pong"))
            sent = clock()
            store.set(ping, "")
            # Not get(): over TCP it is a wait and one more round trip, which would all count as the way back.
            _wait(store, pong, is_near=i > 0)
            back = clock()
            received, answered, main_machine = store.get(pong).decode().split(" ", 2)
            ahead_going, ahead_coming = int(received) - sent, int(answered) - back
            trips.append((ahead_going - ahead_coming, (ahead_going + ahead_coming) // 2))
    delay, offset = min(trips)
    # A machine has one clock. Where the trips allow it say so exactly: over a FileStore they take 10 ms.
    return 0 if machine == main_machine and abs(offset) <= delay / 2 else offset


def _machine() -> str:
    """Return a name that is the same for all processes and containers under one booted kernel."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else platform.node()


def gather(cluster: Cluster, offset_ns: int = 0, events: Iterable[Event] | None = None) -> list[Event] | None:
    """Return all ranks' events on rank 0, by start; None elsewhere. Every rank must call it.

    A rank gives `events`, by default what it recorded, and adds `offset_ns` (from `align`) to their times.
    They travel as compressed JSON: what JSON does not know in `args` arrives as a string.
    """
    store, prefix = cluster.store, _fresh_prefix(cluster, "gather")
    own = [
        event._replace(rank=cluster.rank, start_ns=event.start_ns + offset_ns)
        for event in (recorded() if events is None else events)
    ]
    if not cluster.is_main:
        packed = zlib.compress(json.dumps(own, default=str).encode())
        pieces = [packed[at : at + PIECE_BYTES] for at in range(0, len(packed), PIECE_BYTES)]
        with _expecting(0, "gather", store):
            for i, piece in enumerate(pieces):
                store.set(f"{prefix}/{cluster.rank}/{i}", piece)  # type: ignore[arg-type]  # bytes are fine
            store.set(f"{prefix}/{cluster.rank}/pieces", str(len(pieces)))
        return None

    for rank in range(1, cluster.world_size):
        with _expecting(rank, "gather", store):
            num_pieces = int(store.get(f"{prefix}/{rank}/pieces"))
            keys = [f"{prefix}/{rank}/{i}" for i in range(num_pieces)]
            packed = b"".join(store.get(key) for key in keys)
            for key in keys:
                store.delete_key(key)
        own += [Event(*row) for row in json.loads(zlib.decompress(packed))]
    return sorted(own, key=lambda event: event.start_ns)


def _fresh_prefix(cluster: Cluster, what: str) -> str:
    """Return what no earlier call's keys begin with; ranks agree on it if all make the same calls.

    Not a PrefixStore: that one waits at torch's store, where a watched one would notice a rank's death.
    """
    call = cluster.store.add(f"lab.timeline/{what}/calls/{cluster.rank}", 1)
    return f"lab.timeline/{what}/{call}"


def _wait(store: dist.Store, key: str, is_near: bool) -> None:
    """Wait for a key. `is_near`: at first without a nap; a watched store's is longer than a round trip."""
    deadline = now() + QUICK_NS
    while is_near and now() < deadline:
        if store.check([key]):
            return
    store.wait([key])


@contextmanager
def _expecting(rank: int, what: str, store: dist.Store) -> Iterator[None]:
    try:
        yield
    except WorkbookError as error:  # of a store that is watched
        raise WorkbookError(f"timeline.{what} has waited for rank {rank}. {error}") from error
    except RuntimeError as error:  # all that stores raise, for timeouts and for lost connections
        seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]  # missing in torch's stubs
        raise TimeoutError(
            f"timeline.{what}: rank {rank} did not take part. Is it alive, and does it call {what} too? "
            f"(The store waits {seconds:g} s and says: {str(error).splitlines()[0]})"
        ) from error


def save(
    cluster: Cluster, directory: str | Path, title: str | None = None, events: Iterable[Event] | None = None
) -> list[Path]:
    """Align, gather, write `trace.json` and `timeline.png` on rank 0. Return their paths, [] elsewhere.

    Every rank must call it, with its events or, by default, with all that it recorded.
    """
    everyones = gather(cluster, align(cluster), events)
    if everyones is None:
        return []
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    trace = write_chrome_trace(folder / "trace.json", everyones)
    return [trace, draw(everyones, folder / "timeline.png", title)]

"""Agree on which ranks are alive, and form a group of them in the same processes. Rank 0 coordinates.

      before        rank 0       rank 1       rank 2 ✗     rank 3
      ask           rank 0 ◄──── rank 1                               rank 0 waits for all
                       ▲                                              that are alive
                       └────────────────────────────────── rank 3
      agree         [0, 1, 3] ─► rank 1 ───────────────►   rank 3     all get its list
      after         rank 0       rank 1                    rank 2     a new group, under a new prefix

Rank 0 knows who is alive by the connections of liveness.py. Requests, the list and the keys of the new group
are in the store of the rendezvous, which rank 0 or its launcher hosts. So rank 0 must live: if it dies, the
others end with a sentence. If a rank is connected, but does not answer for `patience` seconds, it hangs. It
could wake up later and continue without the others, so the others name it and end.

A rank may also die during the agreement. If it is in the list, the new group does not form, or its first
collective fails, and all survivors agree again. Systems that can do without any of their ranks, or that
handle a network that splits into two parts, take a majority vote (Ongaro and Ousterhout, "In Search of an
Understandable Consensus Algorithm", 2014).
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from comm.errors import CommError
from comm.membership import liveness
from comm.membership.settings import master
from comm.membership.store import within
from lab.cluster import Cluster
from lab.launch.errors import Complete, WorkbookError
from lab.launch.gloo_threads import keep_from_preempting
from lab.launch.interface import open_sockets, shut_down_connections
from lab.units import MAX_SECONDS

_NAP = 0.002  # seconds between two looks at the store
_ASKING = 0.05  # seconds between two looks of a rank that waits until it is let in
_DYING = 1.0  # seconds after which all know that a rank has died: its connections close one by one

T = TypeVar("T")


class Survivors:
    """Holds the ranks that train: `cluster` describes this rank in their group, and `names` has all of them.

    A rank's name is its rank at the start, and stays the same. With `takes_back` a process that has the name
    of a dead rank can join: there this constructor waits until rank 0 has let it in. `joins` says how often
    that has happened.
    """

    def __init__(self, cluster: Cluster, patience: float, takes_back: bool = False) -> None:
        if not 0 < patience <= MAX_SECONDS / 7:
            raise WorkbookError(f"--patience {patience:g}: it is a number of seconds above 0, at most a day.")
        self.cluster, self.name, self.patience = cluster, cluster.rank, patience
        self.names, self.joins = list(range(cluster.world_size)), 0
        self._num_names = cluster.world_size  # also of those that have died
        self._round = 0  # the number of agreements so far
        key, has_died = f"comes back/{self.name}", not dist.is_initialized()
        number = int(cluster.store.get(key) if has_died else cluster.store.add(f"survivors/{self.name}", 1))
        self._store = dist.PrefixStore(f"survivors/{number}", cluster.store)  # of this training
        liveness.forget()  # its errors would name a rank that the others have gone on without
        gc.freeze()  # gc.collect() in each recovery then skips the objects that the imports made
        self._kept_ports = {master()[1]}  # rank 0 may host the store
        if has_died:
            self._come_back()
            return
        if self.name == 0:
            self._server = liveness.serve(self._store, self._num_names)
            self._kept_ports.add(self._server.place[1])
        self._connect()
        if takes_back:
            cluster.store.set(key, str(number))
        # The group of the rendezvous has another timeout. So form it again, with `patience`.
        dist.destroy_process_group()
        self._form()

    def check(self, may_join: bool) -> None:
        """Raise CommError if the ranks must regroup: because others do so already, or a rank is to join.

        Call it after each step that a rank takes alone, or the others wait for it. If `may_join`, rank 0 also
        looks for a rank that asks to come back.
        """
        if self._at_the_store(lambda store: store.check([f"{self._round + 1}/call"])):
            raise CommError("the other ranks form a new group")
        if may_join and self.name == 0 and self._newcomers():
            raise CommError("a rank comes back")

    def regroup(self) -> None:
        """Form a group of the ranks that are alive. Raise WorkbookError if rank 0 is not, or if one hangs.

        All survivors must call it. At first a collective fails only on the dead rank's neighbours. They close
        their connections here, so it fails on their neighbours next, and in the end on all ranks.
        """
        begin, before, joined = time.perf_counter(), set(self.names), set()
        while True:
            self._leave_group()
            joined |= self._agree()
            with suppress(RuntimeError):  # if another rank has died meanwhile, agree again
                self._form()
                break
        if self.cluster.is_main:
            lost, back = before - {*self.names} | before & joined, joined & {*self.names}
            what = [f"lost rank {', '.join(map(str, sorted(lost)))}"] if lost else []
            what += [f"rank {', '.join(map(str, sorted(back)))} is back"] if back else []
            rest = f"{len(self.names)} ranks go on" if len(self.names) > 1 else "1 rank goes on"
            took = f"{time.perf_counter() - begin:.3f} s"
            print(f"{'; '.join(what) or 'a rank was late'}; {rest} ({took}).", file=sys.stderr, flush=True)

    def misses_a_rank(self) -> bool:
        """Return whether a rank of the group has died, perhaps just now."""
        return self._soon(lambda: not self._lost().isdisjoint(self.names))

    def _agree(self) -> set[int]:
        """Take over rank 0's list, and return the ranks that join. Raise WorkbookError if a rank hangs."""
        number = self._round + 1
        joined = self._take_over(self._at_the_store(lambda store: self._ask(store, number)))
        self._losses -= joined
        return joined

    def _ask(self, store: dist.Store, number: int) -> str:
        store.set(f"{number}/call", "")
        store.set(f"{number}/here/{self.name}", "")
        if self.name == 0:
            self._decide(store, number)
        store.wait([f"{number}/list"], timedelta(seconds=5 * self.patience))
        return store.get(f"{number}/list").decode()

    def _decide(self, store: dist.Store, number: int) -> None:
        """Write the list of the ranks that go on: those that have asked for it, and those that come back."""
        newcomers, deadline = self._newcomers(), time.monotonic() + self.patience
        others = {*self.names} - newcomers.keys()
        here, silent = {0}, others - {0}
        while silent and time.monotonic() < deadline:
            time.sleep(_NAP)
            alive = self._server.present()
            here = {name for name in others if store.check([f"{number}/here/{name}"])}
            silent = (others - here) & alive
        names, joins = sorted(here | newcomers.keys()), self.joins + len(newcomers)
        agreed = json.dumps([number, sorted(silent), names, sorted(newcomers), joins])
        for name, process in newcomers.items():
            store.delete_key(f"asks/{name}")
            store.set(f"invitation/{process}", agreed)
        store.set(f"{number}/list", agreed)
        if silent:
            time.sleep(_DYING)  # so that the others can read why this rank ends

    def _newcomers(self) -> dict[int, str]:
        """Return the ranks that ask to join, each with a name of its process."""
        asked = {name for name in range(1, self._num_names) if self._store.check([f"asks/{name}"])}
        return {name: self._store.get(f"asks/{name}").decode() for name in asked & self._server.present()}

    def _come_back(self) -> None:
        """Ask to join until rank 0 lets this rank in. Raise Complete if there is no training any more."""
        if self.name == 0:
            raise WorkbookError("rank 0 cannot come back, because it coordinated the others: start again.")
        process = f"{self.name} {time.time_ns()}"
        try:
            self._store.set(f"asks/{self.name}", process)  # before rank 0 counts this rank as present
            self._connect()
            while not self._store.check([f"invitation/{process}"]):
                if 0 in self._lost():
                    raise ConnectionError
                time.sleep(_ASKING)
            agreed = self._store.get(f"invitation/{process}").decode()
        except (OSError, dist.DistError):  # rank 0 has gone, or its store
            raise Complete("this rank has come back too late: the others have ended.") from None
        self._take_over(agreed)
        self._losses.clear()  # of the time before
        try:
            self._form()
        except RuntimeError:
            self.regroup()

    def _connect(self) -> None:
        self._connection = liveness.dial(self._store, self.name)
        self._losses: set[int] = set()

    def _lost(self) -> set[int]:
        """Return the ranks of which this one knows that they have died, or 0 if rank 0 has left."""
        try:
            while self._connection.poll():
                self._losses.add(json.loads(self._connection.recv_bytes())["rank"])
        except (EOFError, OSError):
            self._losses.add(0)
        return self._losses

    def _take_over(self, agreed: str) -> set[int]:
        self._round, silent, self.names, joined, self.joins = json.loads(agreed)
        self._refuse(silent)
        if self.name not in self.names:
            raise WorkbookError("the other ranks could not reach this one, so they go on without it.")
        return set(joined)

    def _at_the_store(self, action: Callable[[dist.Store], T]) -> T:
        """Return what the action does with the store. Raise WorkbookError if rank 0 has died, or hangs."""
        try:
            return within(4 * self.patience, lambda: action(self._store), lambda: 0 in self._lost())
        except (RuntimeError, TimeoutError):
            if not self._soon(lambda: 0 in self._lost()):
                self._refuse([0])
        raise WorkbookError("rank 0 has died, and the others cannot go on without it; start all ranks again.")

    def _soon(self, condition: Callable[[], bool]) -> bool:
        """Return whether the condition is true now, or becomes so while a rank that dies closes its ends."""
        deadline = time.monotonic() + _DYING
        while not (is_true := condition()) and time.monotonic() < deadline:
            time.sleep(_NAP)
        return is_true

    def _refuse(self, silent: list[int]) -> None:
        if silent:
            raise WorkbookError(
                f"rank {', '.join(map(str, silent))} has not answered within {self.patience:g} s, but still "
                "exists; it is stuck or paused, so end it and start again."
            )

    def _leave_group(self) -> None:
        """Close this rank's connections, so that the collective fails on its neighbours, too."""
        shut_down_connections(self._sockets, self._kept_ports)
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # the error of the failed collective still refers to the group

    def _form(self) -> None:
        rank, size = self.names.index(self.name), len(self.names)
        store = dist.PrefixStore(f"group/{self._round}", self._store)
        patience = timedelta(seconds=self.patience)
        self._sockets = open_sockets()
        # torch counts the groups of a process, and uses the count in the keys of the store. A group that does
        # not form is counted only on the ranks that tried, and then their keys would differ from the others'.
        distributed_c10d._world.group_count = 0
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
        keep_from_preempting()
        own = dist.PrefixStore(f"lab/{self._round}", self._store)
        self.cluster = Cluster(rank, size, self.cluster.local_rank, self.cluster.device, own)

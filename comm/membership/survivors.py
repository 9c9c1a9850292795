"""Agree on which ranks are alive, and form a group of them in the same processes. Rank 0 coordinates.

      before        rank 0       rank 1       rank 2 ✗     rank 3
      ask           rank 0 ◄──── rank 1 ◄───────────────── rank 3     rank 0 waits for all that are alive
      agree         [0, 1, 3] ─► rank 1 ───────────────►   rank 3     all get its list
      after         rank 0       rank 1                    rank 2     a new group, under a new prefix

Each rank has a connection to rank 0, which the kernel closes when one of the two dies. So rank 0 knows who is
alive, and must live: if it dies, the others end with a sentence. If a rank is connected, but does not answer
for `patience` seconds, it hangs, and could wake up later, so all name it and end. If a rank of the list dies,
the new group does not form, or its first collective fails, and all agree again. Systems that can do without
any of their ranks take a majority vote (Ongaro and Ousterhout's Raft, 2014).
"""

import dataclasses
import gc
import json
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from comm.errors import CommError, LostRank
from comm.membership import liveness
from comm.membership.coordinator import Coordinator
from comm.membership.settings import master
from lab.cluster import Cluster
from lab.launch.errors import Complete, WorkbookError
from lab.launch.gloo_threads import keep_from_preempting
from lab.launch.interface import open_sockets, shut_down_connections
from lab.units import MAX_SECONDS


class Survivors:
    """Holds the ranks that train: `cluster` describes this rank in their group, and `names` has all of them.

    A rank's name is its rank at the start, and stays the same. With `takes_back` a process that has the name
    of a dead rank can join: there this constructor waits until rank 0 has let it in. `joins` counts that.
    """

    def __init__(self, cluster: Cluster, patience: float, takes_back: bool = False) -> None:
        if not 0 < patience <= MAX_SECONDS / 7:
            raise WorkbookError(f"--patience {patience:g}: it is a number of seconds above 0, at most a day.")
        if cluster.device.type != "cpu" and cluster.is_main:
            print(
                "This script trains on the CPU: its ranks go on after a death, as only gloo's can.",
                file=sys.stderr,
            )
        self.cluster = dataclasses.replace(cluster, device=torch.device("cpu"))
        self.name, self.patience = cluster.rank, patience
        self.names, self.joins, self._round = list(range(cluster.world_size)), 0, 0
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
            self.coordinator = Coordinator(self._store, cluster.world_size, patience)
            self._kept_ports.add(self.coordinator.port)
        else:
            self._rank_0 = liveness.dial(self._store, self.name)
        if takes_back:
            cluster.store.set(key, str(number))
        dist.destroy_process_group()  # of the rendezvous, whose timeout is not `patience`
        self._form()

    def check(self, may_join: bool) -> None:
        """Raise CommError if the ranks must regroup: because others do so already, or a rank is to join.

        Call it after each step that a rank takes alone, or the others wait for it. If `may_join`, rank 0 also
        looks for a rank that asks to come back.
        """
        may_join = self.name == 0 and bool(self.coordinator.newcomers()) and may_join
        if may_join or (self.coordinator.asking if self.name == 0 else self._rank_0.poll()):
            raise CommError("the ranks form a new group")

    def regroup(self) -> None:
        """Form a group of the ranks that are alive. Raise WorkbookError if rank 0 is not, or if one hangs.

        All survivors must call it. At first a collective fails only on the dead rank's neighbours. They close
        their connections here, so it fails on their neighbours next, and in the end on all ranks.
        """
        begin, before, joined = time.perf_counter(), {*self.names}, set[int]()
        while True:
            shut_down_connections(self._sockets, self._kept_ports)
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()  # the error of the failed collective still refers to the group
            joined |= self._agree()
            with suppress(RuntimeError):  # if another rank has died meanwhile, agree again
                self._form()
                break
        if self.cluster.is_main:
            rest, took = len(self.names), f"{time.perf_counter() - begin:.3f} s"
            lost, back = before - {*self.names} | before & joined, joined & {*self.names}
            what = ["a rank was late"] * (not lost and not back)
            what += [f"lost rank {', '.join(map(str, sorted(lost)))}"] * bool(lost)
            what += [f"rank {', '.join(map(str, sorted(back)))} is back"] * bool(back)
            what += [f"{rest} rank{'s go' if rest > 1 else ' goes'} on ({took})."]
            print("; ".join(what), file=sys.stderr, flush=True)

    def _agree(self) -> set[int]:
        """Return the ranks that join by rank 0's list. Raise WorkbookError if a rank hangs."""
        agreed = self.coordinator.decide() if self.name == 0 else self._list_of_rank_0()
        silent, self.names, joined, self._round, self.joins = agreed
        if silent:
            raise WorkbookError(
                f"rank {', '.join(map(str, silent))} has not answered within {self.patience:g} s, but still "
                "exists; it is stuck or paused, so end it and start again."
            )
        return {*joined}

    def _list_of_rank_0(self) -> list[Any]:
        liveness.send(self._rank_0, {"rank": self.name})
        try:
            while self._rank_0.poll(4 * self.patience):
                if agreed := json.loads(self._rank_0.recv_bytes()):
                    return list(agreed)
        except (EOFError, OSError):
            cure = "the others cannot go on without it; start all ranks again."
            raise WorkbookError(f"rank 0 has died, and {cure}") from None
        return [[0], self.names, [], self._round, self.joins]

    def _come_back(self) -> None:
        if self.name == 0:
            raise WorkbookError("rank 0 cannot come back, because it coordinated the others: start again.")
        try:
            self._rank_0 = liveness.dial(self._store, self.name)
            self._sockets = open_sockets()
            self._rank_0.poll(None)  # until rank 0 calls
            self.regroup()
        except (OSError, RuntimeError):  # rank 0 has gone, or its store
            raise Complete("this rank has come back too late: the others have ended.") from None

    def _form(self) -> None:
        rank, size = self.names.index(self.name), len(self.names)
        store = dist.PrefixStore(f"group/{self._round}", self._store)
        patience = timedelta(seconds=self.patience)
        self._sockets = open_sockets()
        # torch uses the number of a process's groups in the keys of the store. A group that does not form is
        # counted only on the ranks that tried, and then their keys would differ from the others'.
        distributed_c10d._world.group_count = 0
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
        except RuntimeError as error:
            raise LostRank("cannot form a group: another rank has died or does not answer") from error
        keep_from_preempting()
        own = dist.PrefixStore(f"lab/{self._round}", self._store)
        self.cluster = Cluster(rank, size, self.cluster.local_rank, self.cluster.device, own)

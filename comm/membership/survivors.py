"""Agree on which ranks are alive, and form a group of them in the same processes.

      before        rank 0       rank 1       rank 2 ✗     rank 3
      ask           rank 0 ◄─┬── rank 1                               the lowest rank that is alive decides,
                             └──────────────────────────── rank 3     and looks at the stores of silent ranks
      agree         [0, 1, 3] ─► rank 1 ───────────────►   rank 3     all get its list
      after         rank 0       rank 1                    rank 2     a new group, under a new prefix

At the start each rank opens a small key-value store of its own (TCPStore), and all ranks learn the addresses
of all stores. So the survivors do not need the store of the rendezvous, which dies with its host: rank 0, or
under torchrun the launcher. They write their requests and the list into the decider's store, and the new
group finds its ranks through it, with keys under a prefix that no earlier group has used.

The kernel closes the store of a process that dies, so a store that refuses a connection shows a death at
once. If a store is open, but its rank does not answer for `patience` seconds, that rank hangs. It could wake
up later and continue without the others, so the others name it and end.

A rank may also die during the agreement. If it is the decider, the next rank decides. If it is in the list,
the new group does not form, or its first collective fails, and all survivors agree again. A network that
splits into two parts is not handled: the ranks of both parts would continue. Systems that handle it take a
majority vote (Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm", 2014).
"""

import dataclasses
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from comm.exchange import exchange
from comm.membership import liveness
from comm.membership.store import within
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.launch.gloo_threads import keep_from_preempting
from lab.launch.interface import open_sockets, open_store, own_address, shut_down_connections

_NAP = 0.002  # seconds between two looks at the stores
_DYING = 1.0  # seconds after which a rank that dies has closed its sockets


@dataclasses.dataclass
class ElasticOptions:
    """Holds the options of both elastic trainings: who dies, and how long the others wait."""

    kill: tuple[str, ...] = ()
    """RANK@STEP: the rank kills itself with SIGKILL just before it takes the step. Give several, such as
    2@20 0@40, to kill several ranks. RANK is the number of the rank at the start, also after another rank has
    died. STEP counts from 0."""
    patience: float = 10.0
    """Number of seconds after which the others end, with a sentence, if a rank exists but does not answer."""


class Deaths:
    """Holds the deaths that `--kill` asks for. Raise WorkbookError where it names no rank or no step."""

    def __init__(self, kill: Sequence[str], world_size: int) -> None:
        self._deaths = set()
        for text in kill:
            rank, at, step = text.partition("@")
            if not (at and rank.isdecimal() and step.isdecimal() and int(rank) < world_size):
                raise WorkbookError(
                    f"--kill {text}: write RANK@STEP, with a rank from 0 to {world_size - 1}."
                )
            self._deaths.add((int(rank), int(step)))
        if len({rank for rank, _ in self._deaths}) == world_size:
            raise WorkbookError("--kill names all ranks; one must stay alive.")

    def die_if_due(self, name: int, step: int) -> None:
        """Kill this process if the rank that had the number `name` at the start shall die in this step."""
        if (name, step) in self._deaths:
            os.kill(os.getpid(), signal.SIGKILL)


class Survivors:
    """Holds the ranks that train: `cluster` describes this rank in their group, and `names` has all of them.

    A rank's name is its rank at the start, and stays the same.
    """

    def __init__(self, cluster: Cluster, patience: float) -> None:
        self.cluster, self.name, self.patience = cluster, cluster.rank, patience
        self.names = list(range(cluster.world_size))
        self._store = open_store(own_address(), 0, timedelta(seconds=patience))
        self._addresses: list[tuple[str, int]] = [
            tuple(a) for a in exchange((own_address(), self._store.port))
        ]
        self._rounds = dict.fromkeys(self.names, 0)  # by decider: the agreements that this rank took part in
        liveness.forget()  # its connections go to rank 0, which may die
        gc.freeze()  # gc.collect() in each recovery then skips the objects that the imports made
        # The group of the rendezvous has another timeout. So form it again, with `patience`.
        dist.destroy_process_group()
        number = cluster.store.add(f"survivors/{cluster.rank}", 1)  # of such trainings with this store
        self._form(cluster.store, f"begin/{number}")

    def regroup(self) -> None:
        """Form a group of the ranks that are alive. Raise WorkbookError if one of them does not answer.

        All survivors must call it. At first a collective fails only on the dead rank's neighbours. They close
        their connections here, so it fails on their neighbours next, and in the end on all ranks.
        """
        begin, before = time.perf_counter(), self.names
        while True:
            self._leave_group()
            store, prefix = self._agree()
            with suppress(RuntimeError):  # if another rank has died meanwhile, agree again
                self._form(store, prefix)
                break
        if self.cluster.is_main:
            lost = ", ".join(str(name) for name in before if name not in self.names)
            took = time.perf_counter() - begin
            print(
                f"lost rank {lost}; {len(self.names)} ranks go on ({took:.3f} s).",
                file=sys.stderr,
                flush=True,
            )

    def misses_a_rank(self) -> bool:
        """Return whether a rank of the group has died, perhaps just now: its sockets close one by one."""
        deadline = time.monotonic() + _DYING
        while all(self._is_open(name) for name in self.names):
            if time.monotonic() > deadline:
                return False
            time.sleep(_NAP)
        return True

    def _agree(self) -> tuple[dist.Store, str]:
        """Return the decider's store and a new prefix in it, and set `names`."""
        store: dist.Store
        for decider in self.names:
            number = self._rounds[decider] + 1
            try:
                if decider == self.name:
                    store, names = self._store, self._decide(number)
                else:
                    store, names = self._ask(decider, number)
            except (OSError, RuntimeError) as error:
                if isinstance(error, WorkbookError):
                    raise
                continue  # the decider has died: the next rank decides
            self._rounds[decider], self.names = number, names
            return store, f"{decider}/{number}"
        raise AssertionError("a rank can always decide alone")

    def _ask(self, decider: int, number: int) -> tuple[dist.Store, list[int]]:
        """Return the store of another decider, and its list. Raise OSError or RuntimeError if it dies."""
        host, port = self._addresses[decider]

        def ask() -> tuple[dist.Store, list[list[int]]]:
            store = dist.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=self.patience))
            store.set(f"{number}/here/{self.name}", "")
            store.wait([f"{number}/names"], timedelta(seconds=5 * self.patience))
            return store, json.loads(store.get(f"{number}/names"))

        # If the decider dies now, torch tries to connect for longer than the next one waits for this rank.
        if not self._is_open(decider):
            raise ConnectionRefusedError(f"rank {decider} has died")
        try:
            store, (names, silent) = within(4 * self.patience, ask, lambda: not self._is_open(decider))
        except TimeoutError:
            if self._is_open(decider):
                self._refuse([decider])
            raise
        self._refuse(silent)
        return store, names

    def _decide(self, number: int) -> list[int]:
        """Return the names of the ranks that go on: this one and those that ask for the list."""
        missing = {name for name in self.names if name != self.name}
        deadline = time.monotonic() + self.patience
        while missing and time.monotonic() < deadline:
            missing = {name for name in missing if not self._store.check([f"{number}/here/{name}"])}
            missing = {name for name in missing if self._is_open(name)}
            time.sleep(_NAP)
        here = [n for n in self.names if n == self.name or self._store.check([f"{number}/here/{n}"])]
        self._store.set(f"{number}/names", json.dumps([here, sorted(missing)]))
        if missing:
            time.sleep(_DYING)  # so that the others can read why
        self._refuse(sorted(missing))
        return here

    def _refuse(self, silent: list[int]) -> None:
        if silent:
            raise WorkbookError(
                f"rank {', '.join(map(str, silent))} has not answered within {self.patience:g} s, but still "
                "exists; it is stuck or paused, so end it and start again."
            )

    def _is_open(self, name: int) -> bool:
        """Return whether a rank's store is open. If a connection times out, the rank may hang: True, too."""
        try:
            socket.create_connection(self._addresses[name], timeout=self.patience).close()
        except TimeoutError:
            return True
        except OSError:
            return False
        return True

    def _leave_group(self) -> None:
        """Close this rank's connections, so that the collective fails on its neighbours, too."""
        shut_down_connections(self._sockets, {port for _, port in self._addresses})
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # the error of the failed collective still refers to the group

    def _form(self, store: dist.Store, prefix: str) -> None:
        rank, size = self.names.index(self.name), len(self.names)
        group_store = dist.PrefixStore(f"group/{prefix}", store)
        patience = timedelta(seconds=self.patience)
        self._sockets = open_sockets()
        # torch counts the groups of a process, and uses the count in the keys of the store. A group that does
        # not form is counted only on the ranks that tried, and then their keys would differ from the others'.
        distributed_c10d._world.group_count = 0
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=size, timeout=patience)
        keep_from_preempting()
        own = dist.PrefixStore(f"lab/{prefix}", store)
        self.cluster = Cluster(rank, size, self.cluster.local_rank, self.cluster.device, own)

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
once. If a whole machine has gone, such as a container after `docker kill`, connecting to its store takes too
long. If a store is open, but its rank does not answer for `patience` seconds, that rank hangs. It could wake
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
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from comm.errors import CommError
from comm.exchange import exchange
from comm.membership import liveness
from comm.membership.settings import master
from comm.membership.store import within
from lab.cluster import Cluster
from lab.launch.errors import Complete, WorkbookError
from lab.launch.gloo_threads import keep_from_preempting
from lab.launch.interface import open_sockets, open_store, own_address, shut_down_connections
from lab.units import MAX_SECONDS

_NAP = 0.002  # seconds between two looks at the stores
_DYING = 1.0  # seconds after which a rank that dies has closed its sockets
_CONNECTING = 2.0  # seconds after which a connection times out: the kernel repeats its request after one
_ASKING = 0.05  # seconds after which a rank that comes back asks again

Address = list[Any]  # host and port
T = TypeVar("T")


@dataclasses.dataclass
class ElasticOptions:
    """Holds the options of elastic trainings: who dies, and how long the others wait."""

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

    A rank's name is its rank at the start, and stays the same. With `takes_back` a process that has the name
    of a dead rank can join: there this constructor waits until the others have let it in. `joins` says how
    often that has happened.
    """

    def __init__(self, cluster: Cluster, patience: float, takes_back: bool = False) -> None:
        if not 0 < patience <= MAX_SECONDS / 7:
            raise WorkbookError(f"--patience {patience:g}: it is a number of seconds above 0, at most a day.")
        self.cluster, self.name, self.patience = cluster, cluster.rank, patience
        self.names: list[int] = []
        self.joins = 0
        self._addresses: list[Address] = []  # by name
        self._rounds: list[int] = []  # by name: the agreements that this rank has decided
        self._store = open_store(own_address(), 0, timedelta(seconds=patience))
        self._own_address: Address = [own_address(), self._store.port]
        self._probes: dict[tuple[str, int], socket.socket] = {}  # connections to stores, see _is_open
        self._meeting: dist.Store | None = None  # where a rank asks to come back; it may die with its host
        liveness.forget()  # its connections go to rank 0, which may die
        gc.freeze()  # gc.collect() in each recovery then skips the objects that the imports made
        if dist.is_initialized():
            self._begin(takes_back)
        else:  # this rank has died and comes back
            number = cluster.store.get(f"comes back/{self.name}").decode()
            self._meeting = dist.PrefixStore(f"survivors/{number}", cluster.store)
            self._sockets = open_sockets()
            self.regroup()

    def _begin(self, takes_back: bool) -> None:
        store, size = self.cluster.store, self.cluster.world_size
        self.names, self._addresses = list(range(size)), exchange(self._own_address)
        self._rounds = [0] * size
        # The group of the rendezvous has another timeout. So form it again, with `patience`.
        dist.destroy_process_group()
        number = store.add(f"survivors/{self.name}", 1)  # of such trainings with this store
        if takes_back:
            self._meeting = dist.PrefixStore(f"survivors/{number}", store)
            store.set(f"comes back/{self.name}", str(number))
        self._form(store, f"begin/{number}")

    def check(self, may_join: bool) -> None:
        """Raise CommError if the ranks must regroup: because others do so already, or a rank is to join.

        Call it after each step that a rank takes alone, or the others wait for it. If `may_join`, rank 0 of
        the group also looks for a rank that asks to come back.
        """
        if self._store.check(["call"]):
            address, number = json.loads(self._store.get("call"))
            # The agreement may have been made already.
            if address in self._addresses and number > self._rounds[self._addresses.index(address)]:
                raise CommError("the other ranks form a new group")
        if may_join and self.cluster.is_main and self._newcomers():
            raise CommError("a rank comes back")

    def regroup(self) -> None:
        """Form a group of the ranks that are alive. Raise WorkbookError if one of them does not answer.

        All survivors must call it. At first a collective fails only on the dead rank's neighbours. They close
        their connections here, so it fails on their neighbours next, and in the end on all ranks.
        """
        before = None
        while True:
            self._leave_group()
            if self.name not in self.names:
                self._wait_for_invitation()
            if before is None:
                begin, before = time.perf_counter(), self._members()
            agreed = self._agree()
            if agreed is not None and self.name in self.names:
                with suppress(RuntimeError):  # if another rank has died meanwhile, agree again
                    self._form(*agreed)
                    break
        if self.cluster.is_main:
            lost, joined = (
                ", ".join(str(name) for name, *_ in sorted(some))
                for some in (before - self._members(), self._members() - before)
            )
            what = [f"lost rank {lost}"] * bool(lost) + [f"rank {joined} is back"] * bool(joined)
            rest = f"{len(self.names)} ranks go on" if len(self.names) > 1 else "1 rank goes on"
            print(
                f"{'; '.join(what) or 'a rank was late'}; {rest} ({time.perf_counter() - begin:.3f} s).",
                file=sys.stderr,
                flush=True,
            )

    def misses_a_rank(self) -> bool:
        """Return whether a rank of the group has died, perhaps just now: its sockets close one by one."""
        deadline = time.monotonic() + _DYING
        while all(self._is_open(self._addresses[name]) for name in self.names):
            if time.monotonic() > deadline:
                return False
            time.sleep(_NAP)
        return True

    def _members(self) -> set[tuple[int, str, int]]:
        """Return the name and the address of each rank; a rank that has come back has another address."""
        return {(name, *self._addresses[name]) for name in self.names}

    def _agree(self) -> tuple[dist.Store, str] | None:
        """Take over the decider's list; return its store and a new prefix in it, or None if all have died."""
        store: dist.Store
        for decider in self.names:
            number = self._rounds[decider] + 1
            try:
                store = self._decide(number) if decider == self.name else self._ask(decider, number)
            except (OSError, RuntimeError) as error:
                if isinstance(error, WorkbookError):
                    raise
                continue  # the decider has died: the next rank decides
            return store, f"{decider}/{number}"
        return None  # only for a rank that has come back; another one can always decide alone

    def _ask(self, decider: int, number: int) -> dist.Store:
        """Take over another decider's list; return its store. Raise OSError or RuntimeError if it dies."""
        host, port = address = self._addresses[decider]

        def ask() -> tuple[dist.Store, list[Any]]:
            store = dist.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=self.patience))
            store.set("call", json.dumps([address, number]))
            store.set(f"{number}/here/{self.name}", "")
            store.wait([f"{number}/list"], timedelta(seconds=5 * self.patience))
            return store, json.loads(store.get(f"{number}/list"))

        # If the decider dies now, torch tries to connect for longer than the next one waits for this rank.
        if not self._is_open(address):
            raise ConnectionRefusedError(f"rank {decider} has died")
        try:
            store, (silent, *found) = within(4 * self.patience, ask, lambda: not self._is_open(address))
        except TimeoutError:
            if self._is_open(address):
                self._refuse([decider])
            raise
        self._refuse(silent)
        self.names, self._addresses, self._rounds, self.joins = found
        return store

    def _decide(self, number: int) -> dist.Store:
        """List the ranks that go on: this one, those that ask for the list, and those that come back."""
        newcomers = self._newcomers()
        for name, address in newcomers.items():
            self._addresses[name], self._rounds[name] = address, 0
        others = [name for name in self.names if name != self.name and name not in newcomers]
        self.names = sorted([self.name, *others])
        for name in newcomers:
            self._write(name, "invitation", json.dumps([self.names, self._addresses, self._rounds]))
        self._at_the_meeting(lambda store: [store.delete_key(f"asks/{name}") for name in newcomers])
        for name in others:
            self._write(name, "call", json.dumps([self._own_address, number]))
        missing, deadline = {*others, *newcomers}, time.monotonic() + self.patience
        while missing and time.monotonic() < deadline:
            missing = {name for name in missing if not self._store.check([f"{number}/here/{name}"])}
            missing = {name for name in missing if self._is_open(self._addresses[name])}
            time.sleep(_NAP)
        here = [name for name in (*others, *newcomers) if self._store.check([f"{number}/here/{name}"])]
        silent = sorted(missing - {*here, *newcomers})  # a newcomer that is silent may ask again
        self.names, self.joins = sorted([self.name, *here]), self.joins + len(newcomers.keys() & set(here))
        self._rounds[self.name] = number
        found = [silent, self.names, self._addresses, self._rounds, self.joins]
        self._store.set(f"{number}/list", json.dumps(found))
        if silent:
            time.sleep(_DYING)  # so that the others can read why
        self._refuse(silent)
        return self._store

    def _newcomers(self) -> dict[int, Address]:
        """Return the addresses of the processes that ask to join, by the names that they will have."""

        def look(store: dist.Store) -> dict[int, Address]:
            others = [name for name in range(len(self._addresses)) if name != self.name]
            asked = [name for name in others if store.check([f"asks/{name}"])]
            return {name: json.loads(store.get(f"asks/{name}")) for name in asked}

        return {
            name: address
            for name, address in (self._at_the_meeting(look) or {}).items()
            if (name not in self.names or address != self._addresses[name]) and self._is_open(address)
        }

    def _wait_for_invitation(self) -> None:
        """Ask to join until a decider calls this rank. Raise Complete if there is no training any more."""
        if self._meeting is None:
            raise WorkbookError("the other ranks could not reach this one, so they go on without it.")
        try:
            while not self._store.check(["invitation"]):
                self._meeting.set(f"asks/{self.name}", json.dumps(self._own_address))
                if not any(map(self._is_open, json.loads(self._meeting.get("members")))):
                    raise RuntimeError("no rank is left")
                time.sleep(_ASKING)
        except RuntimeError as error:
            raise Complete(
                "this rank has come back too late: the others have ended, or the store in which it "
                "asks to join has died with rank 0."
            ) from error
        self.names, self._addresses, self._rounds = json.loads(self._store.get("invitation"))
        self._store.delete_key("invitation")

    def _write(self, name: int, key: str, value: str) -> None:
        """Write into another rank's store. A thread does it, because that rank may hang or die."""
        host, port = address = self._addresses[name]
        patience = timedelta(seconds=self.patience)

        def write() -> None:
            with suppress(RuntimeError):
                if self._is_open(address):  # else torch tries to connect again and again
                    dist.TCPStore(host, port, None, is_master=False, timeout=patience).set(key, value)

        threading.Thread(target=write, daemon=True).start()

    def _at_the_meeting(self, action: Callable[[dist.Store], T]) -> T | None:
        """Return what the action does with the store of the rendezvous, or None if that has died."""
        if (store := self._meeting) is not None:
            try:
                return within(self.patience, lambda: action(store))
            except (RuntimeError, TimeoutError):
                self._meeting = None
        return None

    def _refuse(self, silent: list[int]) -> None:
        if silent:
            raise WorkbookError(
                f"rank {', '.join(map(str, silent))} has not answered within {self.patience:g} s, but still "
                "exists; it is stuck or paused, so end it and start again."
            )

    def _is_open(self, address: Address) -> bool:
        """Return whether a rank's store is open. The kernel closes it when the rank dies.

        The kernel also accepts connections for a rank that hangs, but not any number of them. So there is
        one, which stays open and shows a later death.
        """
        place = (address[0], address[1])
        try:
            if place not in self._probes:
                connection = socket.create_connection(place, timeout=min(self.patience, _CONNECTING))
                connection.setblocking(False)
                self._probes[place] = connection
            return self._probes[place].recv(1) != b""  # b"": it was closed
        except BlockingIOError:
            return True
        except OSError:  # also a timeout: its machine has gone
            return False

    def _leave_group(self) -> None:
        """Close this rank's connections, so that the collective fails on its neighbours, too."""
        self._probes.clear()
        # Connections to stores stay. Rank 0 may host that of the rendezvous, in which others ask to join.
        shut_down_connections(self._sockets, {master()[1], *(port for _, port in self._addresses)})
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
        if self.cluster.is_main:
            members = json.dumps([self._addresses[name] for name in self.names])
            self._at_the_meeting(lambda store: store.set("members", members))

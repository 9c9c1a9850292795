"""Find out which ranks of a group share a host, by the hostname and the boot id of each rank.

      rank 0   node0, booted as 5f3a...  ─┐
      rank 1   node0, booted as 5f3a...  ─┼── a 64-bit hash of both from each rank ──►  hosts = [0, 0, 1]
      rank 2   node1, booted as 91c0...  ─┘

Two machines may have the same hostname, but not the same boot id, which Linux draws when it starts. Other
systems have none, and there the hostname alone counts. A container has a hostname of its own, so it is a
host. With the variable WORKBOOK_HOST, which replaces the hostname, ranks of one machine stand for several
hosts. The ranks of a group exchange their hashes once, when an algorithm first asks.
"""

import hashlib
import os
import socket
import weakref

import torch.distributed as dist

from comm.wire.gloo_wire import peer_wire
from comm.wire.handshake import exchange_numbers
from comm.wire.wire import Wire
from lab.launch.threads import machine_id

VARIABLE = "WORKBOOK_HOST"
_hosts: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]]" = weakref.WeakKeyDictionary()


def own_host() -> int:
    """Return the hash of this rank's host, a signed 64-bit number."""
    name = os.environ.get(VARIABLE) or socket.gethostname()
    digest = hashlib.blake2b(f"{name}\n{machine_id()}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def hosts_of(wire: Wire) -> list[int]:
    """Return the number of each rank's host, from 0. At its first use in a group, all ranks must call it."""
    if wire.group not in _hosts:
        wire.finish_handshake()  # after it all ranks are known to call this
        apart = peer_wire(wire.group, counted=False)  # as the addresses of the streams, it is no header
        hashes = [host for [host] in exchange_numbers(apart, [own_host()])]
        numbers = {one: number for number, one in enumerate(dict.fromkeys(hashes))}
        _hosts[wire.group] = [numbers[one] for one in hashes]
    return _hosts[wire.group]

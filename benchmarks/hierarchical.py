"""Compare the hierarchical all-reduce with a flat ring, on two hosts with two ranks each and a slow link.

    sudo .venv/bin/python benchmarks/hierarchical.py             a table; --json for one JSON line

      host 0: ranks 0 1 ──── 1 Gbit/s ──── bridge ──── 1 Gbit/s ──── host 1: ranks 2 3

A host is a network namespace with one link, which its ranks share. They also share memory, as on a machine.
`tc` limits the rate at which a host sends. That needs root, and the programs ip and tc (Linux). Everything
is removed at the end.

A flat ring depends on the order of its ranks. With ranks 0 and 1 on host 0, two of its four links are between
hosts. With ranks 0 and 2 on host 0 (rows "interleaved"), all four are. The rows in bytes compare what both
hosts together have sent in one all-reduce, by the counters of their links: headers of TCP included.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import tyro

from benchmarks.side_by_side import MIB, alternate, leave_gloo_as_it_is, medians, row, show
from comm import collectives
from comm.cost import by_reach
from comm.exchange import exchange
from comm.rendezvous import join, leave
from comm.wire.hosts import VARIABLE
from lab.launch.interface import interface_bytes_sent

PLACEMENTS = {"": [0, 0, 1, 1], " interleaved": [0, 1, 0, 1]}  # the host of each rank
PATTERNS = ("hierarchical", "ring", "pipelined_ring", "torch")
SHAPE = "tbf rate 1gbit burst 256kb latency 100ms"  # 0.955 Gbit/s of payload
AS_RANK = "from benchmarks.hierarchical import be_a_rank; be_a_rank()"
SETTLE = 0.05  # seconds after which a link has sent all that was queued for it


@dataclasses.dataclass
class Args:
    """Compare the hierarchical all-reduce with a flat ring between two hosts."""

    mib: int = 16
    """Size of the tensor in MiB."""
    runs: int = 9
    """Timed runs of each pattern, after two that do not count."""
    quick: bool = False
    """Measure only the placement in which neighbours in the ring share a host."""
    json: bool = False
    """Print one JSON line instead of a table."""


def measure(args: Args) -> dict[str, dict[str, float]]:
    """Return for each pattern its seconds, and the bytes that both hosts have sent."""
    cluster = join()
    x = torch.ones(args.mib * MIB // 4)
    calls = {name: partial(collectives.all_reduce, x, op="mean", pattern=name) for name in PATTERNS}
    for call in calls.values():
        call()
        assert x.eq(1).all()
    sent = {}
    for name, call in calls.items():
        before = _sent_by_all_hosts()
        call()
        sent[name] = _sent_by_all_hosts() - before
    seconds = medians(exchange(alternate(calls, args.runs)))
    result = {name: {"seconds": seconds[name], "bytes": sent[name]} for name in PATTERNS}
    leave(cluster)
    return result


def be_a_rank() -> None:
    """Measure as one of the ranks that `run_on` starts, and print the result."""
    print(json.dumps(measure(tyro.cli(Args))))


def _sent_by_all_hosts() -> int:
    collectives.barrier()
    time.sleep(SETTLE)
    sent = exchange([os.environ[VARIABLE], interface_bytes_sent()])
    return sum(dict(sent).values())  # the ranks of a host share its counter


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Provide two network namespaces: their links lead to a bridge in a third one."""
    names = [f"workbook{os.getpid()}{what}" for what in ("bridge", "host0", "host1")]
    bridge, *hosts = names
    try:
        for name in names:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"-n {bridge} link add name bridge type bridge")
        _ip(f"-n {bridge} link set bridge up")
        for number, host in enumerate(hosts):
            _ip(f"-n {host} link add eth0 type veth peer name port{number} netns {bridge}")
            _ip(f"-n {bridge} link set port{number} master bridge up")
            _ip(f"-n {host} address add {_address(number)}/24 dev eth0")
            _ip(f"-n {host} link set eth0 up")
            _run(f"tc -n {host} qdisc add dev eth0 root {SHAPE}")
        yield hosts
    finally:
        for name in names:
            with suppress(SystemExit):
                _ip(f"netns delete {name}")


def _address(host: int) -> str:
    return f"10.251.0.{host + 1}"


def _ip(words: str) -> None:
    _run(f"ip {words}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"cannot make the hosts: `{command}` failed: {done.stderr.strip()}")


def run_on(hosts: list[str], placement: list[int], args: Args) -> dict[str, dict[str, float]]:
    """Run `measure` on each rank in the namespace of its host, and return what rank 0 returned."""
    common = {
        "WORLD_SIZE": len(placement),
        "LOCAL_WORLD_SIZE": placement.count(0),
        "MASTER_ADDR": _address(0),
        "MASTER_PORT": 29500,
    }
    ranks = []
    for rank, host in enumerate(placement):
        mine = {"RANK": rank, "LOCAL_RANK": placement[:rank].count(host), VARIABLE: f"host{host}"}
        environment = os.environ | {key: str(value) for key, value in (common | mine).items()}
        command = ["ip", "netns", "exec", hosts[host], sys.executable, "-c", AS_RANK, *sys.argv[1:]]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=environment, stdout=out, text=True))
    try:
        printed, _ = ranks[0].communicate(timeout=300)
        if any(rank.wait(timeout=60) for rank in ranks):
            raise SystemExit("a rank has failed; its error is above.")
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    return json.loads(printed.splitlines()[-1])


def rows_of(placement: str, result: dict[str, dict[str, float]], num_bytes: int) -> list[dict[str, Any]]:
    """Return the rows of a placement: seconds and bytes against each of the other patterns."""
    rows = []
    for unit, key in (("s", "seconds"), ("bytes", "bytes")):
        ours = result["hierarchical"][key]
        for other in PATTERNS[1:]:
            place = "all_reduce hierarchical", f"{other}{placement}", "1gbit"
            theirs = result[other][key]
            rows.append(row(*place, ours, theirs, world_size=4, unit=unit, num_bytes=num_bytes))
    return rows


def main(args: Args) -> None:
    if not shutil.which("ip") or not shutil.which("tc") or os.geteuid() != 0:
        raise SystemExit("This benchmark makes network namespaces: run it as root on Linux, with ip and tc.")
    rows = []
    with two_hosts() as hosts:
        for name, placement in list(PLACEMENTS.items())[: 1 if args.quick else None]:
            rows += rows_of(name, run_on(hosts, placement, args), args.mib * MIB)
    show("hierarchical", rows, args.json, f"an all-reduce of {args.mib} MiB on 2 hosts x 2 ranks, 1 Gbit/s")
    if not args.json:
        for name, placement in PLACEMENTS.items():
            ratio = bytes_between_hosts("hierarchical", placement) / bytes_between_hosts("ring", placement)
            print(f"bytes between hosts by formula, against ring{name}: {ratio:.2f}")


def bytes_between_hosts(pattern: str, placement: list[int]) -> int:
    """Return what both hosts together send each other in an all-reduce of 4 MiB, by the formula."""
    return sum(by_reach(pattern, MIB, 4, placement, rank)[1].bytes_sent for rank in range(len(placement)))


if __name__ == "__main__":
    leave_gloo_as_it_is()
    main(tyro.cli(Args))

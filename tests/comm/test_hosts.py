"""Ranks find out which of them share a host, once for each group."""

import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from comm import collectives
from comm.algorithms.hierarchical import ranks_by_host
from comm.transport import streams
from comm.transport.choice import use_transport
from comm.wire import hosts
from comm.wire.handshake import RowExchange
from comm.wire.wire import peer_wire
from lab.ranks import run_ranks


def test_hosts_are_numbered_in_the_order_of_their_lowest_ranks():
    assert hosts.numbered([7, -3, 7, 9, -3]) == [0, 1, 0, 2, 1]
    assert ranks_by_host([0, 1, 0, 2, 1]) == [[0, 2], [1, 4], [3]]
    assert ranks_by_host([5]) == [[0]]


def test_a_host_is_a_name_and_a_boot_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def of(name: str, boot_id: str | None) -> int:
        file = tmp_path / "boot_id"
        file.write_text(f"{boot_id}\n") if boot_id else file.unlink(missing_ok=True)
        monkeypatch.setattr(hosts, "_BOOT_ID", file)
        monkeypatch.setattr("socket.gethostname", lambda: name)
        return hosts.own_host()

    monkeypatch.delenv(hosts.VARIABLE, raising=False)
    different = [of("node0", "5f3a"), of("node0", "91c0"), of("node1", "5f3a"), of("node0", None)]
    assert len(set(different)) == 4 and all(-(2**63) <= one < 2**63 for one in different)
    assert of("node0", "5f3a") == different[0]

    monkeypatch.setenv(hosts.VARIABLE, "node1")  # replaces the hostname
    assert of("node0", "5f3a") == different[2]
    monkeypatch.setenv(hosts.VARIABLE, "")
    assert of("node0", "5f3a") == different[0]


def test_ranks_of_one_machine_share_a_host_and_a_variable_divides_them():
    def look(cluster) -> list[list[int]]:
        seen = [hosts.hosts_of(peer_wire(None))]
        for names in ("aabb", "abab", "baab"):
            with mock.patch.dict("os.environ", {hosts.VARIABLE: names[cluster.rank]}):
                seen.append(hosts.hosts_of(peer_wire(dist.new_group(range(4)))))
        return seen

    expected = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]]
    assert run_ranks(look, 4) == [expected] * 4


def test_a_group_exchanges_its_hosts_once_and_forgets_them_with_itself():
    def work(cluster) -> tuple[int, int]:
        use_transport("gloo")
        group = dist.new_group(range(3))
        with mock.patch.object(hosts, "RowExchange", side_effect=RowExchange) as exchanges:
            for _ in range(3):
                collectives.all_reduce(torch.ones(5), group=group, pattern="hierarchical")
        count, known = exchanges.call_count, len(hosts._hosts)
        exchanges.reset_mock()  # it holds the wire, which holds the group
        dist.destroy_process_group(group)
        del group
        gc.collect()
        return count, known - len(hosts._hosts)

    assert run_ranks(work, 3) == [(1, 1)] * 3


def test_over_streams_hosts_travel_with_the_addresses():
    def count(cluster) -> tuple[int, int]:
        with (
            mock.patch.object(hosts, "RowExchange", side_effect=RowExchange) as others,
            mock.patch.object(streams, "RowExchange", side_effect=RowExchange) as addresses,
        ):
            for _ in range(3):
                collectives.all_reduce(torch.ones(5), pattern="hierarchical")
        return others.call_count, addresses.call_count

    assert run_ranks(count, 3) == [(0, 1)] * 3

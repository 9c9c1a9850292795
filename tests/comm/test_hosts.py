"""Ranks find out which of them share a host, once for each group."""

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from comm.algorithms.hierarchical import ranks_by_host
from comm.wire import hosts
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

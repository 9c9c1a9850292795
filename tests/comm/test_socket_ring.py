"""The ring on plain sockets accepts only its neighbours, and fails with an error if they cannot connect."""

import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from comm.collectives import CommError, all_reduce
from comm.transport import neighbours, sockets
from comm.transport.neighbours import Listeners
from lab.interface import own_address
from lab.ranks import RankError, run_ranks


def knock(port: int, data: bytes) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", port))
    if data:
        stranger.sendall(data)
    return stranger


def test_other_programs_that_connect_do_not_keep_the_neighbour_out(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(neighbours, "_TOKEN_SECONDS", 0.1)
    with Listeners(unix=False) as listeners:
        _, port, token = listeners.row()
        silent, wrong, short = knock(port, b""), knock(port, struct.pack("!q", 1)), knock(port, b"abc")
        gone = knock(port, b"")
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()  # with a reset
        neighbour = knock(port, struct.pack("!q", token))
        with listeners.accept(time.monotonic() + 20) as accepted:
            assert accepted.getpeername() == neighbour.getsockname()
        for end in (silent, wrong, short, neighbour):
            end.close()


def test_the_name_of_the_unix_socket_does_not_tell_the_token():
    with Listeners(unix=True) as listeners:
        names = [line for line in Path("/proc/net/unix").read_text().splitlines() if "@workbook-" in line]
        assert names
        assert not [line for line in names if f"{listeners.row()[2]:016x}" in line]


def test_a_rank_waits_until_the_deadline_however_many_other_programs_connect(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(neighbours, "_TOKEN_SECONDS", 0.05)
    with Listeners(unix=True) as listeners:
        stop, strangers = threading.Event(), []

        def keep_knocking() -> None:
            while not stop.wait(0.05):
                strangers.append(knock(listeners.row()[1], b""))

        thread = threading.Thread(target=keep_knocking)
        thread.start()
        try:
            with pytest.raises(TimeoutError):
                listeners.accept(time.monotonic() + 0.5)
        finally:
            stop.set()
            thread.join()
        for stranger in strangers:
            stranger.close()


def test_all_ranks_name_at_once_the_one_without_an_address():
    def one_has_none(cluster) -> None:
        if cluster.rank == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "none0"
        all_reduce(torch.ones(3), pattern="tcp")

    for error in run_ranks(one_has_none, 3, group_timeout=40, collect_failures=True):
        assert isinstance(error, RankError)
        assert "all_reduce (tcp): rank 1 has no address to which its neighbour could connect." in str(error)


@pytest.mark.parametrize("pattern", ["tcp", "cma"])
def test_a_rank_that_dies_before_it_connects_is_noticed_at_once(pattern: str):
    def work(cluster) -> None:
        if cluster.rank == 2:
            sockets.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(torch.ones(3), pattern=pattern)

    ends = run_ranks(work, 3, collect_failures=True, timeout=20)
    assert str(ends[2]) == "rank 2 was killed by SIGKILL before it returned."
    for rank in (0, 1):  # rank 2 should connect to rank 0, and rank 1 waits for rank 0
        assert f"all_reduce ({pattern}): rank {rank} could not " in str(ends[rank])


def test_the_address_is_that_of_the_interface_gloo_uses_or_of_the_one_that_leads_to_the_master(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"


def test_two_ranks_that_do_not_fit_both_raise_although_the_payload_was_in_flight():
    def other_sizes(cluster) -> None:
        for numel in (10, 2_000_000):
            with pytest.raises(CommError, match=rf"rank 0: .* of {numel} el.*; rank 1: .* of {2 * numel} el"):
                all_reduce(torch.ones(numel * (1 + cluster.rank)), pattern="tcp")
            x = torch.ones(3)
            all_reduce(x, pattern="tcp")
            assert x.tolist() == [2.0] * 3

    run_ranks(other_sizes, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the open files in /proc")
def test_mismatches_leave_no_connection_behind():
    def open_files(cluster) -> list[int]:
        counts = []
        for _ in range(6):
            for pattern in ("tcp", "cma"):
                with pytest.raises(CommError):
                    all_reduce(torch.ones(1 + cluster.rank), pattern=pattern)
                all_reduce(torch.ones(3), pattern=pattern)
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts

    for counts in run_ranks(open_files, 3):
        assert len(set(counts[1:])) == 1


@pytest.mark.parametrize("pattern", ["tcp", "cma"])
def test_a_tensor_that_was_sent_can_still_free_its_memory(pattern: str):
    def send_and_free(cluster) -> int:
        x = torch.ones(100_000)
        all_reduce(x, pattern=pattern)
        x.untyped_storage().resize_(0)
        return x.untyped_storage().nbytes()

    assert run_ranks(send_and_free, 2) == [0, 0]

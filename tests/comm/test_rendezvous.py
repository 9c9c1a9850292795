"""Processes that know an address become a group, or all of them raise an error that says why not."""

import os
import socket
import sys
from contextlib import ExitStack, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from comm import collectives, rendezvous
from comm.collectives import CommError
from comm.membership import meeting
from comm.membership.settings import name_of, refuse_a_hidden_gpu, refuse_without_kernels
from comm.script import joined
from comm.wire.transport import TRANSPORTS, use_transport
from lab.launch.interface import open_store
from lab.ranks import RankError
from lab.replace import replaced
from tests.comm.places import VARIABLES, free_port, places, started
from tests.processes import listening


def ends_of(results: list[Any]) -> list[Any]:
    """Return what each rank has returned, or the last line of its error."""
    return [str(r).strip().splitlines()[-1] if isinstance(r, RankError) else r for r in results]


def meet(*environments: dict[str, object], timeout: float = 40) -> list[Any]:
    """Start a process for each environment; return its rank, its world size and the sum of the ranks."""

    def come(cluster) -> tuple[int, int, float]:
        meeting._TELL, meeting._LINGER = 0.3, 0.5
        place = rendezvous.join()
        total = torch.tensor([float(place.rank)])
        collectives.all_reduce(total)
        rendezvous.leave(place)
        return place.rank, place.world_size, total.item()

    return ends_of(started(come, list(environments), timeout=timeout))


def anybody_listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("localhost", port)) == 0


def own_network_address() -> str:
    """Return this machine's address in its default network, or the loopback's if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 1))  # sends nothing
        return probe.getsockname()[0]
    return "127.0.0.1"


def test_ranks_meet_in_any_number_and_no_port_stays_open(capfd):
    for n in (1, 3):
        environments = places(list(range(n)), n)
        assert meet(*environments) == [(rank, n, n * (n - 1) / 2) for rank in range(n)]
        assert not anybody_listens(environments[0]["MASTER_PORT"])
    assert "all 3 ranks have met" in capfd.readouterr().err


def listened_to(cluster) -> tuple[set[str], set[str]]:
    """Join and use all patterns; return the addresses on which this rank listens, and Python's own."""
    bound: set[str] = set()

    def watch(event: str, args: tuple) -> None:
        if event == "socket.bind" and args[0].family != socket.AF_UNIX:
            bound.add(args[1][0])

    sys.addaudithook(watch)
    with joined():
        collectives.all_reduce(torch.ones(100_000), pattern="torch")
        for transport in TRANSPORTS:
            use_transport(transport)
            collectives.all_reduce(torch.ones(100_000))
        return {address for address, _ in listening(os.getpid())}, bound


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the sockets in /proc")
def test_ranks_started_by_hand_listen_in_the_network_of_the_master_only():
    for master in ("localhost", "127.0.0.1", own_network_address()):
        only = {"127.0.0.1" if master == "localhost" else master}
        assert started(listened_to, places([0, 1], 2, MASTER_ADDR=master)) == [(only, only)] * 2


def test_without_any_variable_one_process_is_a_group_of_its_own():
    assert meet({}) == [(0, 1, 0.0)]


def test_missing_ranks_are_named_on_all_others_also_while_these_wait(capfd):
    # On a busy machine a rank may start a second later than another one, and must still find the store.
    texts = meet(*places([0, 1, 3], 5, JOIN_TIMEOUT=4))
    assert len(set(texts)) == 1
    assert "ranks 2, 4 of 5 did not join within 4 s" in texts[0]
    told = capfd.readouterr().err
    for rank in (0, 1, 3):
        assert f"rank {rank} of 5: still waiting for ranks 2, 4" in told


def test_two_processes_with_one_rank_are_refused_on_all_ranks():
    texts = meet(*places([0, 1, 1], 3))
    assert len(set(texts)) == 1
    assert "Two processes claim rank 1: process " in texts[0] and "give each its own RANK" in texts[0]


def test_different_world_sizes_are_refused_on_both_sides():
    port = free_port()
    texts = meet(*[{"RANK": rank, "WORLD_SIZE": 2 + rank, "MASTER_PORT": port} for rank in (0, 1)])
    assert len(set(texts)) == 1
    assert "was started with WORLD_SIZE" in texts[0] and "all ranks need the same" in texts[0]


def test_a_port_in_use_is_refused_on_rank_0():
    with socket.create_server(("localhost", 0)) as other_program:
        port = other_program.getsockname()[1]
        (text,) = meet(*places([0], 2, MASTER_PORT=port))
    assert f"Port {port} on localhost is taken by another program" in text


def test_a_program_that_never_answers_is_not_waited_for():
    with socket.create_server(("localhost", 0)) as other_program:
        port = other_program.getsockname()[1]
        (text,) = meet(*places([1], 2, MASTER_PORT=port, JOIN_TIMEOUT=1), timeout=4)
    assert f"The program at localhost:{port} is not a rendezvous store" in text


def test_a_master_that_was_not_started_is_named_with_its_address():
    (environment,) = places([1], 2, JOIN_TIMEOUT=1)
    (text,) = meet(environment)
    assert f"cannot reach the store at localhost:{environment['MASTER_PORT']}" in text
    assert "refused" in text and "rank 0 opens it there" in text


def test_a_torch_without_kernels_for_the_gpu_is_refused_with_the_index_to_take():
    for architectures in (["sm_80", "sm_90"], ["sm_75", "compute_75"], ["sm_90a"], ["gfx90a"], []):
        refuse_without_kernels((9, 0), architectures)
    for capability, architectures in (((7, 0), ["sm_75", "sm_80"]), ((12, 0), ["sm_80", "sm_90a"])):
        with pytest.raises(CommError, match=f"no kernels for the GPU here.*{architectures[0]}.*--index-url"):
            refuse_without_kernels(capability, architectures)


def test_a_gpu_that_torch_cannot_use_is_named_with_its_cures_unless_it_is_hidden_on_purpose(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/nvidia0")
    with pytest.raises(CommError, match=r"built for CUDA 13.0, cannot use it: the driver .* older torch"):
        refuse_a_hidden_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refuse_a_hidden_gpu()


def test_gpus_of_amd_without_a_uuid_are_told_apart_by_their_place(monkeypatch):
    places = iter([(0, 3, 0), (0, 4, 0)])

    def properties(device: Any) -> SimpleNamespace:
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        return SimpleNamespace(uuid="GPU-XX", **dict(zip(names, next(places), strict=True)))

    monkeypatch.setattr("torch.version.hip", "7.0")
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    assert name_of(torch.device("cuda", 0)) != name_of(torch.device("cuda", 1))


LAUNCHERS = [
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
]


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK is 'two'; it must be a non-negative integer"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4, but with WORLD_SIZE 4 it must be in 0..3"),
        *(
            ({size: "4", rank: "0"}, f"{size} is 4, but RANK is not set, so each process would train alone")
            for size, rank in LAUNCHERS
        ),
        ({"RANK": "0"}, "WORLD_SIZE is not set; start the script with torchrun"),
        ({"BACKEND": "mpi"}, "BACKEND is 'mpi'; it must be gloo or nccl"),
        ({"JOIN_TIMEOUT": "soon"}, "JOIN_TIMEOUT is 'soon'; it must be a number of seconds above 0"),
        ({"MASTER_ADDR": "0.0.0.0"}, "MASTER_ADDR is 0.0.0.0, which means every interface"),
        ({"MASTER_ADDR": "::1"}, "MASTER_ADDR is ::1, which has an IPv6 address only"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999; it must be at most 65535"),
        ({"OP_TIMEOUT": "0"}, "OP_TIMEOUT is '0'; it must be a number of seconds above 0"),
        ({"OP_TIMEOUT": "1e300"}, "OP_TIMEOUT is '1e300'; it must be a number of seconds"),
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "GLOO_SOCKET_IFNAME is 'nosuch0', but this machine has no"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(environment, sentence, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommError) as error:
        rendezvous.join()
    assert sentence in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("BACKEND", "nccl")
    with pytest.raises(CommError, match="BACKEND is nccl, but this machine has no GPU"):
        rendezvous.join()


def test_a_restarted_job_does_not_read_what_its_predecessor_left_in_the_agents_store():
    port = free_port()
    agent = open_store("127.0.0.1", port, timedelta(seconds=10))
    for attempt in range(2):
        environments = places(
            [0, 1],
            2,
            MASTER_PORT=port,
            TORCHELASTIC_USE_AGENT_STORE=True,
            TORCHELASTIC_RESTART_COUNT=attempt,
        )
        assert meet(*environments) == [(0, 2, 1.0), (1, 2, 1.0)]
    del agent


def meet_on_gpus(visible: list[list[str]], **variables: object) -> list[Any]:
    """Start a rank for each entry, which lists its GPUs; return its device and backend, or its error."""

    def come(cluster) -> tuple[str, str]:
        names, asked = visible[cluster.rank], []
        os.environ["LOCAL_RANK"] = str(cluster.rank)
        meeting._LINGER = 0.5

        def form(backend: str, **options: Any) -> None:
            asked.append(backend)
            plain("gloo", **options)

        plain = dist.init_process_group
        with ExitStack() as stubs:
            stubs.enter_context(
                mock.patch.multiple(
                    torch.cuda,
                    is_available=lambda: True,
                    device_count=lambda: len(names),
                    set_device=lambda device: None,
                    get_device_properties=lambda device: SimpleNamespace(
                        uuid=names[device.index], major=9, minor=0
                    ),
                )
            )
            stubs.enter_context(mock.patch.object(dist, "init_process_group", form))
            joined = rendezvous.join()
            rendezvous.leave(joined)
        return str(joined.device), asked[0]

    environments = places(list(range(len(visible))), len(visible), **variables)
    return ends_of(started(come, environments, timeout=40))


def test_a_rank_takes_its_gpu_of_all_or_the_only_one_that_it_is_shown():
    assert meet_on_gpus([["a", "b"], ["a", "b"]]) == [("cuda:0", "nccl"), ("cuda:1", "nccl")]
    assert meet_on_gpus([["a"], ["b"], ["c"]]) == [("cuda:0", "nccl")] * 3


def test_two_ranks_with_one_gpu_are_refused_on_all_ranks():
    sentence = (
        "comm.errors.CommError: Ranks 0 and 2 share one GPU (a), and nccl needs one for each rank; start "
        "fewer ranks there, give each its own LOCAL_RANK, or let them share with BACKEND=gloo."
    )
    assert meet_on_gpus([["a", "b"]] * 3) == [sentence] * 3
    assert meet_on_gpus([["a", "b"]] * 3, BACKEND="gloo") == [
        ("cuda:0", "gloo"),
        ("cuda:1", "gloo"),
        ("cuda:0", "gloo"),
    ]


def threads_after_joining(cluster, cores: list[set[int]]) -> int:
    """Join with these cores; return the number of threads with which this rank then computes."""
    torch.set_num_threads(8)
    with (
        replaced("lab.launch.threads.own_cores", lambda: frozenset(cores[cluster.rank])),
        joined(),
    ):
        return torch.get_num_threads()


def test_ranks_started_by_hand_share_the_cores_of_their_machine():
    def threads(cores: list[set[int]], **others: object) -> list[int]:
        n = len(cores)
        return started(threads_after_joining, places(list(range(n)), n, **others), cores)

    six = set(range(6))
    assert threads([six, six, six]) == [2, 2, 2]
    assert threads([{0}, {0}, {1, 2, 3}]) == [1, 1, 3], "the third is pinned to cores of its own"
    assert threads([set(range(64))]) == [8], "not more than torch takes by itself"
    assert threads([six, six], OMP_NUM_THREADS=5) == [8, 8], "torch has read it already"

"""Test the fake GPU itself: what a real one would do wrongly, or refuse, is an error here."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm.collectives import all_reduce
from lab.cluster import Cluster
from lab.ranks import RankError
from tests.fake_gpu.ranks import SHORT, on_gpus, run_script

ADAMW = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
ADAMW["maximize"] = False
LIMITS = {"FAKE_ORDER": "1", "FAKE_RESIDENT": "1", "FAKE_TIMEOUT": "3"}


def streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(), torch.cuda.Stream()


def test_a_stream_must_wait_for_the_kernel_of_another_one_before_it_reads_or_writes():
    def work(cluster: Cluster) -> None:
        one, other = streams()
        with torch.cuda.stream(one):
            written, read = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
            ready = one.record_event()
            copy = read.clone()
        with torch.cuda.stream(other):
            with pytest.raises(RuntimeError, match=r"mul reads memory that aten::fill_ on another stream"):
                written * 2
            other.wait_event(ready)
            with pytest.raises(RuntimeError, match=r"fill_ writes to memory that .* on another stream reads"):
                read.fill_(1)
            other.wait_stream(one)
            read.add_(written * 2)
        with pytest.raises(RuntimeError, match="on another stream writes to"):
            read.sum()
        torch.cuda.synchronize()
        assert read.sum() == 8 and copy.sum() == 0

    on_gpus(work, ranks=1)


def test_parts_of_a_tensor_may_be_written_on_two_streams():
    def work(cluster: Cluster) -> None:
        full, (one, other) = torch.zeros(4, device="cuda"), streams()
        for stream, part in ((one, full[:2]), (other, full[2:])):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                part.add_(1)

    on_gpus(work, ranks=1)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_that_another_stream_uses_is_freed_only_after_that_or_if_it_was_recorded(is_recorded: bool):
    def work(cluster: Cluster) -> None:
        for waits in (True, False):
            x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.mul_(2)
            if is_recorded:
                x.record_stream(side)
            if waits:
                torch.cuda.current_stream().wait_stream(side)
            del x
            torch.ones(4, device="cuda")

    if is_recorded:
        on_gpus(work, ranks=1)
    else:
        with pytest.raises(RankError, match="memory was freed that aten::mul on another stream writes to"):
            on_gpus(work, ranks=1)


@pytest.mark.parametrize(
    ("passes", "operation"),
    [
        (True, lambda x: x * torch.tensor(2.0)),
        (True, lambda x: x[torch.tensor([0])]),
        (False, lambda x: x.index_select(0, torch.tensor([0]))),
        (False, lambda x: torch.addmm(torch.tensor(1.0), x, x)),
        (False, lambda x: torch.cat([x, torch.ones(1, 2)])),
        (False, lambda x: torch._fused_adamw_([x], [x], [x], [x], [], [torch.tensor(1.0)], **ADAMW)),
    ],
)
def test_tensors_of_the_host_pass_only_where_torch_lets_them(passes: bool, operation):
    def work(cluster: Cluster) -> None:
        operation(torch.ones(2, 2, device="cuda"))

    if passes:
        on_gpus(work, ranks=1)
    else:
        with pytest.raises(RankError, match=r"two devices, cuda:0 and cpu|cpu and cuda:0"):
            on_gpus(work, ranks=1)


def test_a_thread_that_has_chosen_no_device_may_not_wait_for_an_event():
    def work(cluster: Cluster) -> None:
        errors: list[str] = []

        def wait() -> None:
            try:
                event.synchronize()
            except RuntimeError as error:
                errors.append(str(error))

        event = torch.cuda.current_stream().record_event()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert "a thread that has chosen no device" in errors[0]

    on_gpus(work, ranks=1)


def two_groups_at_once(cluster: Cluster, all_reduce: Any = dist.all_reduce) -> None:
    groups, x = [dist.new_group([0, 1]) for _ in range(2)], torch.ones(2, 2, device="cuda")
    for _ in range(20):
        pairs = zip(x, groups, strict=True)
        under_way = [all_reduce(row, group=group, async_op=True) for row, group in pairs]
        for work in under_way:
            work.wait()
    torch.cuda.synchronize()


def test_operations_of_two_groups_that_begin_in_any_order_deadlock_where_there_is_room_for_one(capfd):
    on_gpus(two_groups_at_once, **LIMITS, NCCL_LAUNCH_ORDER_IMPLICIT="1")
    with pytest.raises(RankError):
        on_gpus(two_groups_at_once, **LIMITS, NCCL_LAUNCH_ORDER_IMPLICIT="0")
    assert "a deadlock" in capfd.readouterr().err


def test_on_gpus_of_amd_the_operations_of_one_group_wait_for_those_of_another():
    def work(cluster: Cluster) -> None:
        torch.version.hip = "7.0"
        two_groups_at_once(cluster, all_reduce)

    on_gpus(work, **LIMITS, NCCL_LAUNCH_ORDER_IMPLICIT="0")


@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [("hsdp", ("--shard-size", "2"), 4), ("diloco", (), 2), ("compressed", (), 2)],
)
def test_techniques_with_several_groups_need_room_for_one_operation_only(name, options, ranks, seed):
    room = {"FAKE_ORDER": seed, "FAKE_RESIDENT": "1"}
    figures = run_script(f"low_communication/train_{name}.py", *SHORT, *options, ranks=ranks, **room)
    assert figures["replicas_equal"] is True

"""Test that sharding within machines trains as one process does, and what it sends where."""

import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from comm.collectives import use_pattern
from comm.wire.hosts import VARIABLE
from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from low_communication.train_hsdp import HybridShardedDataParallel, machine_groups
from tests.data_parallel.equivalence import Odd, accumulate, examples, mine, odd_loss, text, text_loss
from tests.dtensors import full_tensors
from tests.training.attempts import refusal, the_one_sentence, train
from tests.zero.sharded import Blocks, Sharded, compare_with_one_process, deep_gpt
from tests.zero.test_equality import Layers


def hybrid(cluster: Cluster, shard_size: int | None, pattern: str | None = None) -> Any:
    """Return a wrapper of a module, with the groups of a rank, in which messages travel by `pattern`."""
    shards, replicas = machine_groups(cluster, shard_size)
    for group in (shards, replicas):
        use_pattern(pattern, group)
    return lambda module, _=None, **options: HybridShardedDataParallel(module, shards, replicas, **options)


def named_hosts(cluster: Cluster, names: str) -> None:
    """Let each rank have the host with its letter."""
    os.environ[VARIABLE] = names[cluster.rank]


@pytest.mark.parametrize(("n", "shard_sizes"), [(2, [1, 2]), (3, [None]), (4, [2]), (6, [3])])
def test_gradients_and_parameters_equal_one_process(n: int, shard_sizes: list[int | None]):
    def work(cluster: Cluster) -> None:
        odd = examples(cluster.world_size)
        for size in shard_sizes:
            wrap = hybrid(cluster, size)
            compare_with_one_process(cluster, "zero3", "adamw", Odd, odd_loss, odd, wrap=wrap)
            if n == 4:  # blocks, of which one runs twice
                make = functools.partial(Layers, shares=True)
                clip = {"clip": 0.01, "wrap": wrap}
                compare_with_one_process(cluster, "zero3", "momentum", make, odd_loss, odd, **clip)

    run_ranks(work, n, timeout=60)


def test_gradients_equal_those_of_fsdp2_on_a_mesh_of_two_dimensions():
    def work(cluster: Cluster) -> None:
        ours = Sharded("zero3", deep_gpt(0), "sgd", wrap=hybrid(cluster, 2))
        theirs = deep_gpt(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for part in (*theirs.blocks, theirs):
            fully_shard(part, mesh=mesh)
        x, y = mine(cluster, text())
        for i, (some_x, some_y) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            theirs.set_requires_all_reduce(i == 1)
            (text_loss(theirs, some_x, some_y) / 2).backward()
        ours.accumulate(text_loss, (x, y), 2)
        assert_same(ours.gradients(), full_tensors(gradients(theirs)), what="gradient")
        assert_same(ours.parameters(), full_tensors(parameters(theirs)), 0, "parameter")

    run_ranks(work, 4, timeout=60)


def test_parameters_and_their_gathers_stay_on_a_machine():
    def work(cluster: Cluster) -> None:
        # Six ranks are on two machines, and neighbours are on different ones.
        named_hosts(cluster, "ababab")
        shards, replicas = machine_groups(cluster, None)
        assert dist.get_process_group_ranks(shards) == [[0, 2, 4], [1, 3, 5]][cluster.rank % 2]
        # The ranks with the same shard are one on each machine.
        assert dist.get_process_group_ranks(replicas) == [[0, 1], [2, 3], [4, 5]][cluster.rank // 2]

        # Three equal blocks, which six ranks divide without padding. There is no root.
        module, P = Blocks(12), 3 * 12 * 12 * 4
        model = HybridShardedDataParallel(module, shards, replicas)
        x = torch.ones(2, 12)
        LEDGER.clear()
        model.require_backward_grad_sync = False
        for _ in range(2):
            model(x).sum().backward()
        # The next forward waits for the last reduce-scatter.
        model.require_backward_grad_sync = True
        model.end_backward()
        # Each microbatch gathers three blocks, and two of them again, and reduce-scatters three.
        each = 8 * (P // 3) * 2 // 3
        assert bytes_by_axis() == {"shards": 2 * each}
        model(x).sum().backward()
        model.finish_gradient_sync()
        # Between the two machines, a rank all-reduces its third of the gradients once: 2 (k-1)/k P/m.
        assert bytes_by_axis() == {"shards": 3 * each, "replicas": P // 3}

    run_ranks(work, 6, timeout=60)


def bytes_by_axis() -> dict[str, int]:
    """Return the bytes that this rank has sent along each axis, without headers."""
    sent: dict[str, int] = {}
    for entry, traffic in LEDGER.rows().items():
        if entry.pattern != "header":
            sent[entry.axis] = sent.get(entry.axis, 0) + traffic.bytes_sent
    return sent


def test_a_step_sends_exactly_what_the_formula_says_with_every_option():
    def work(cluster: Cluster) -> None:
        half = {"reshard_after_forward": False, "compute_dtype": torch.bfloat16}
        ways: list[tuple[int, str | None, dict[str, Any]]] = [(2, None, {}), (3, "tree", {}), (3, None, half)]
        for size, pattern, way in ways:
            model = hybrid(cluster, size, pattern)(deep_gpt(0), **way)
            LEDGER.clear()
            accumulate(model, text_loss, mine(cluster, text()), 2)
            model.clip_grad_norm_(1.0)
            assert LEDGER.total() == model.traffic(2, is_clipped=True), (size, pattern, way)

    run_ranks(work, 6, timeout=60)


def test_a_step_before_gradients_are_averaged_over_machines_is_refused():
    def work(cluster: Cluster) -> None:
        model = hybrid(cluster, 1)(nn.Linear(3, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.full((1, 3), float(cluster.rank))

        def gradient_is(expected: float) -> bool:
            [parameter] = model.parameters()
            return torch.equal(parameter.grad.as_subclass(Tensor), torch.full((1, 3), expected))

        model.require_backward_grad_sync = False
        model(x).sum().backward()
        with pytest.raises(WorkbookError, match="Call finish_gradient_sync"):
            optimizer.step()
        model.finish_gradient_sync()
        assert gradient_is(0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.require_backward_grad_sync = True
        model(x).sum().backward()
        model.finish_gradient_sync()
        assert gradient_is(0.5)

    run_ranks(work, 2)


def test_machines_of_different_sizes_and_shards_that_do_not_divide_the_ranks_are_refused():
    def work(cluster: Cluster) -> list[str]:
        said = [refusal(cluster, "hsdp", shard_size=size) for size in (3, 0)]
        named_hosts(cluster, "aaab")
        return [*said, refusal(cluster, "hsdp")]

    three, zero, uneven = map(the_one_sentence, zip(*run_ranks(work, 4), strict=True))
    assert three == "--shard-size 3: it must divide the number of ranks, 4."
    assert zero == "--shard-size 0: it must divide the number of ranks, 4."
    assert uneven.startswith("The machines have 3, 1 ranks, and hybrid sharding needs equally many on each")


def test_zero3_resumes_a_checkpoint_and_the_other_way_round(tmp_path):
    ways: list[tuple[str, int]] = [("hsdp", 4), ("zero3", 3), ("hsdp", 2)]
    for steps, (mode, n) in enumerate(ways, start=1):
        here = {"checkpoint": str(tmp_path), "steps": steps} | ({"resume": True} if steps > 1 else {})
        reports = run_ranks(lambda cluster, mode=mode, here=here: train(cluster, mode, **here), n)
        for one in reports:
            assert one["steps"] == 1 and one["bytes_sent"] == one["bytes_formula"] and one["replicas_equal"]
            if mode == "hsdp":
                assert one["machines"] == 2 and one["replicas_bytes_sent"] > 0
                held = [one[f"{how}parameters_bytes"] for how in ("", "formula_")]
                assert held[0] == pytest.approx(held[1], rel=1e-2)
    straight = run_ranks(lambda cluster: train(cluster, "zero3", steps=len(ways)), 1)[0]
    assert reports[0]["last_loss"] == pytest.approx(straight["last_loss"], rel=1e-4)

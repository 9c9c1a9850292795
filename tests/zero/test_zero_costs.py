"""Test that the bytes which each stage of ZeRO holds and sends equal the formulas."""

import pytest
import torch
from torch import nn

from comm.cost import Link
from comm.wire import slow_link
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Entry
from lab.trace.memory import live_bytes
from tests.zero.sharded import STAGES, Blocks, Sharded, total


@pytest.mark.parametrize("n", [1, 2, 4])
def test_stages_1_2_and_3_send_2_2_and_3_times_the_parameters(n: int):
    def count(cluster) -> None:
        # Divisible by 4, so nothing is padded; all parameters are in blocks, so all are gathered twice.
        for stage, times in (("zero1", 2), ("zero2", 2), ("zero3", 3)):
            torch.manual_seed(0)
            module = Blocks()
            num_bytes = sum(p.nbytes for p in module.parameters())
            ours = Sharded(stage, module, "adamw")
            for microbatches in (1, 3):
                LEDGER.clear()
                ours.optimizer.zero_grad()
                ours.accumulate(total, (torch.ones(3, 8), torch.ones(3)), microbatches)
                ours.optimizer.step()
                rows = {entry: traffic.bytes_sent for entry, traffic in LEDGER.rows().items()}
                sent = {op: rows.get(Entry(op, "ring"), 0) for op in ("reduce_scatter", "all_gather")}
                each = num_bytes * (n - 1) // n
                reductions = 1 if stage == "zero1" else microbatches
                gathers = 2 * microbatches if stage == "zero3" else 1
                assert sent == {"reduce_scatter": each * reductions, "all_gather": each * gathers}
                if microbatches == 1:
                    assert sum(sent.values()) == times * each

    run_ranks(count, n)


def test_between_steps_a_rank_holds_what_the_formula_says_and_nothing_else():
    def measure(cluster, stage: str) -> dict[str, int]:
        module = Blocks()
        before = live_bytes({})["other"]
        P = sum(p.nbytes for p in module.parameters())
        ours = Sharded(stage, module, "adamw")
        x = torch.ones(2, 8)
        for _ in range(2):
            ours.optimizer.zero_grad()
            ours.accumulate(total, (x, x), 1)
            ours.optimizer.step()
        counters = sum(4 for _ in ours.pieces)
        held = live_bytes({})["other"] - before + P - x.nbytes - counters
        n = cluster.world_size
        divided = {"zero1": (1, 1, n), "zero2": (1, n, n), "zero3": (n, n, n)}[stage]
        assert held == sum(size // by for size, by in zip((P, P, 2 * P), divided, strict=True)), stage
        return held

    for stage in STAGES:
        run_ranks(measure, 2, stage)


def test_stages_2_and_3_never_hold_the_full_gradient_and_stage_3_holds_at_most_two_blocks():
    def watch(cluster, stage: str) -> tuple[int, int]:
        module = nn.Sequential()
        module.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        module.forward = lambda x: [x := torch.tanh(block(x)) for block in module.blocks][-1]
        options = {} if stage == "zero3" else {"bucket_mb": 64 * 64 * 4 / 2**20, "first_mb": 1e-6}
        ours = Sharded(stage, module, "sgd", **options)
        whole_blocks, buffers = [], []

        def look() -> None:
            if stage == "zero3":
                whole_blocks.append(sum(unit.full is not None for unit in ours.model.units))
                buffers.append(sum(unit.gradients.full is not None for unit in ours.model.units))
            else:
                buffers.append(len(ours.optimizer._filling) + len(ours.optimizer._in_flight))

        for block in module.blocks:
            block.register_forward_pre_hook(lambda *_: look())
            block.register_full_backward_pre_hook(lambda *_: look())
        with slow_link.slowed(Link(0.002, 0.0)):
            for _ in range(2):
                ours.optimizer.zero_grad()
                x = torch.ones(4, 64, requires_grad=True)
                ours.accumulate(total, (x, x), 1)
                ours.optimizer.step()
        return max(whole_blocks, default=0), max(buffers)

    for stage, most_whole in (("zero2", 0), ("zero3", 2)):
        for whole_blocks, buffers in run_ranks(watch, 2, stage):
            assert whole_blocks == most_whole, stage
            assert 1 <= buffers <= 3, stage  # one is being filled, two are being sent

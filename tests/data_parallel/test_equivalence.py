"""Test that every wrapper's replicas have the gradients that one process gets from the global batch."""

import contextlib
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel import train_bucket_overlap, train_naive, train_overlap
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.check import assert_same, gradients, parameters, reference_gradients
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tests.data_parallel.equivalence import (
    OURS,
    WRAPPERS,
    EitherWay,
    Odd,
    accumulate,
    compare_with_one_process,
    examples,
    gpt,
    mean_square,
    mine,
    odd_loss,
    text,
    text_loss,
)
from training.replicas import replicas_equal


def compare_all(cluster: Cluster) -> None:
    for name, wrap in WRAPPERS.items():
        compare_with_one_process(cluster, wrap, gpt, text_loss, text(), what=f"{name}, GPT")
        compare_with_one_process(
            cluster, wrap, Odd, odd_loss, examples(cluster.world_size), what=f"{name}, Odd"
        )


def test_gradients_and_parameters_equal_one_process_on_1_rank():
    run_ranks(compare_all, 1)


def test_gradients_and_parameters_equal_one_process_on_2_ranks():
    run_ranks(compare_all, 2)


def test_gradients_and_parameters_equal_one_process_on_3_ranks():
    run_ranks(compare_all, 3)


def test_gradients_and_parameters_equal_one_process_on_4_ranks():
    run_ranks(compare_all, 4)


def test_untied_weights_have_separate_gradients():
    def work(cluster: Cluster) -> None:
        for name, wrap in WRAPPERS.items():
            compare_with_one_process(
                cluster, wrap, lambda seed: gpt(seed, tied=False), text_loss, text(), (1,), name
            )

    run_ranks(work, 2)


def test_gradients_of_microbatches_add_up_to_those_of_the_full_batch():
    def work(cluster: Cluster) -> None:
        for name, wrap in WRAPPERS.items():
            compare_with_one_process(cluster, wrap, gpt, text_loss, text(), (3, 2), name)

    run_ranks(work, 2)


def test_ranks_start_from_rank_0s_parameters_and_buffers():
    def work(cluster: Cluster) -> None:
        reference = Odd(0)
        for name, wrap in WRAPPERS.items():
            model = wrap(Odd(cluster.rank))
            assert_same(parameters(model.module), parameters(reference), 0, f"parameter of {name}")
            assert torch.equal(model.module.scale, reference.scale), name

    run_ranks(work, 3)


def test_a_gradient_is_the_mean_over_ranks_and_not_their_sum():
    def work(cluster: Cluster) -> None:
        for name, wrap in WRAPPERS.items():
            model = wrap(nn.Linear(3, 2, bias=False))
            model(torch.ones(1, 3) * (cluster.rank + 1)).sum().backward()
            model.finish_gradient_sync()
            mean = torch.full((2, 3), 2.0)  # of 1, 2 and 3
            assert_same(gradients(model.module), {"weight": mean}, what=f"gradient of {name}")

    run_ranks(work, 3)


def test_a_mean_in_fp16_does_not_overflow_even_if_the_sum_would():
    def work(cluster: Cluster) -> None:
        for name, wrap in WRAPPERS.items():
            model = wrap(nn.Linear(1, 1, bias=False).half())
            model(torch.full((1, 1), 40000.0).half()).sum().backward()
            model.finish_gradient_sync()
            mean = torch.full((1, 1), 40000.0).half()
            assert_same(gradients(model.module), {"weight": mean}, 2**-9, f"gradient of {name}")

    run_ranks(work, 3)


def test_a_parameter_has_a_gradient_on_all_ranks_or_on_none():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            model = wrap(Odd(cluster.rank))
            odd_loss(model, *mine(cluster, examples(4))).backward()
            only_here = model.module.late.weight.grad is not None
            model.finish_gradient_sync()
            assert only_here == (cluster.rank == 3), name
            assert model.module.late.weight.grad is not None, name
            assert model.module.never.weight.grad is None, name
            assert model.module.frozen.weight.grad is None, name

    run_ranks(work, 4)


class Switched(nn.Module):
    """A model whose layer `sometimes` is used only if it is switched on."""

    leaves_unused = True

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor, switched_on: bool) -> Tensor:
        return self.always(x) + self.sometimes(x) if switched_on else self.always(x)


def test_the_ranks_that_use_a_parameter_may_change_from_step_to_step():
    def work(cluster: Cluster) -> None:
        for name, wrap in WRAPPERS.items():
            model = wrap(Switched())
            for users, expected in (((0, 1, 2), 1.0), ((), None), ((1,), 1 / 3), ((0, 1, 2), 1.0)):
                model.zero_grad()
                model(torch.ones(1, 2), cluster.rank in users).sum().backward()
                model.finish_gradient_sync()
                sometimes = None if expected is None else torch.full((3, 2), expected)
                assert_same(
                    gradients(model.module),
                    {"always.weight": torch.ones(3, 2), "sometimes.weight": sometimes},
                    1e-6,
                    f"gradient of {name}, used by ranks {users},",
                )

    run_ranks(work, 3)


def test_hooks_on_one_rank_may_fire_in_another_order():
    def work(cluster: Cluster) -> None:
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(3)).double()
        expected = reference_gradients(EitherWay(0, False), lambda m: mean_square(m, x))
        for name, wrap in WRAPPERS.items():
            model = wrap(EitherWay(cluster.rank, backwards=cluster.rank == 0))
            for step in range(3):
                model.zero_grad()
                mean_square(model, *mine(cluster, (x,))).backward()
                model.finish_gradient_sync()
                assert_same(gradients(model.module), expected, what=f"gradient of {name}, step {step},")

    run_ranks(work, 3, timeout=20)


def test_a_rank_without_a_backward_contributes_zeros():
    def work(cluster: Cluster) -> None:
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(3)).double()
        for name, wrap in OURS.items():
            model = wrap(EitherWay(0, backwards=True))
            for step in range(3):
                model.zero_grad()
                if cluster.rank == step:
                    mean_square(model, x).backward()
                model.finish_gradient_sync()
                expected_mean = reference_gradients(EitherWay(0, True), lambda m: mean_square(m, x) / 3)
                assert_same(gradients(model.module), expected_mean, what=f"gradient of {name}, step {step},")

    run_ranks(work, 3, timeout=20)


def test_replicas_in_float32_stay_bitwise_equal_over_20_steps():
    wrappers = {name: WRAPPERS[name] for name in ("naive", "overlap", "a bucket for each", "ddp")}
    for dtype in ("bf16", "fp16"):
        wrappers[dtype] = lambda module, dtype=dtype: BucketDataParallel(module, wire_dtype=dtype)

    def work(cluster: Cluster) -> None:
        x, y = mine(cluster, examples(3))
        for name, wrap in wrappers.items():
            model = wrap(MLP([7, 5, 3], seed=cluster.rank))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(20):
                optimizer.zero_grad()
                accumulate(model, odd_loss, (x.float(), y), 1)
                optimizer.step()
            assert replicas_equal(cluster, model), name

    run_ranks(work, 3)


def test_a_step_sends_exactly_what_the_formula_says():
    wrappers = (
        (train_naive, "ring", NaiveDataParallel, {}),
        (train_overlap, "ring", OverlapDataParallel, {}),
        (train_bucket_overlap, "ring", BucketDataParallel, {"bucket_mb": 0.01}),
        (train_bucket_overlap, "ring", BucketDataParallel, {"wire_dtype": "bf16"}),
        (train_bucket_overlap, "ring", BucketDataParallel, {"bucket_mb": 0.01, "in_place": True}),
    )

    def work(cluster: Cluster) -> None:
        for lesson, pattern, wrapper, options in wrappers:
            model = wrapper(gpt(cluster.rank), pattern=pattern, **options)
            for microbatches in (1, 2):  # the first step sends the order of the buckets, too
                before = LEDGER.total()
                accumulate(model, text_loss, mine(cluster, text()), microbatches)
                sent, formula = LEDGER.total() - before, lesson.traffic_per_step(model, pattern)
                assert sent == formula, f"{lesson.__name__}, {options}, {microbatches} microbatches"

    for world_size in (1, 2, 3, 4):
        run_ranks(work, world_size)


def test_a_second_backward_before_finish_gradient_sync_is_refused():
    def work(cluster: Cluster) -> None:
        for name in ("overlap", "overlap by torch", "a bucket for each", "one bucket"):
            model = OURS[name](nn.Linear(2, 2))
            model(torch.ones(1, 2)).sum().backward()
            for sync in (contextlib.nullcontext, model.no_sync):
                with sync(), pytest.raises(WorkbookError, match="Another backward began before finish"):
                    model(torch.ones(1, 2)).sum().backward()

    run_ranks(work, 2)


def test_a_module_without_trained_parameters_is_allowed():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            for module in (nn.Identity(), nn.Linear(2, 2).requires_grad_(False)):
                model = wrap(module)
                for _ in range(2):
                    model(torch.ones(1, 2))
                    model.finish_gradient_sync()
                assert all(gradient is None for gradient in gradients(module).values()), name

    run_ranks(work, 2)


def test_gradients_are_averaged_within_the_given_group_only():
    def work(cluster: Cluster) -> None:
        group = dist.new_group([1, 3])
        if cluster.rank in (0, 2):
            return
        for name, wrap in WRAPPERS.items():
            torch.manual_seed(cluster.rank)
            model = wrap(nn.Linear(3, 2, bias=False), group)
            torch.manual_seed(1)
            rank_1s = nn.Linear(3, 2, bias=False).weight
            assert torch.equal(model.module.weight, rank_1s), name
            for _ in range(2):
                model.zero_grad()
                model(torch.ones(1, 3) * cluster.rank).sum().backward()
                model.finish_gradient_sync()
                assert torch.equal(model.module.weight.grad, torch.full((2, 3), 2.0)), name  # of 1 and 3

    run_ranks(work, 4, timeout=20)


@pytest.mark.parametrize("name", ["overlap", "overlap by torch", "a bucket for each", "buckets", "ddp"])
def test_a_rank_that_dies_in_the_backward_is_named_by_the_ranks_that_wait_for_it(name: str):
    def work(cluster: Cluster) -> None:
        model = WRAPPERS[name](nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4))))
        if cluster.rank == 2:
            model.module[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        model(torch.ones(1, 3)).sum().backward()
        model.finish_gradient_sync()

    # The group's timeout comes later: the error must not depend on it.
    results = run_ranks(work, 3, timeout=20, group_timeout=40, collect_failures=True)
    texts = [str(result).rsplit("comm.errors.CommError: ", 1)[-1] for result in results]
    assert texts[2] == "rank 2 was killed by SIGKILL before it returned."
    for rank in (0, 1):
        assert re.match(rf"all_reduce \((pipelined_ring|ring|torch)\): rank {rank} ", texts[rank])
        assert "has died or left, so look for the first error in its log" in texts[rank]
    assert name in ("overlap by torch", "ddp") or any("rank 2 has died" in texts[rank] for rank in (0, 1))

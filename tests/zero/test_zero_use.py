"""Test uses of the stages of ZeRO: state dicts, evaluation, schedulers, optimizers, and mistakes."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lab.check import assert_same, parameters
from lab.launch.errors import WorkbookError
from lab.ranks import RankError, run_ranks
from tests.data_parallel.equivalence import BATCH, Odd, examples, mine, odd_loss, text, text_loss
from tests.zero.sharded import (
    STAGES,
    Blocks,
    Sharded,
    compare_with_one_process,
    deep_gpt,
    full_tensors,
)
from zero.elementwise import refuse_unless_elementwise
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel


def test_a_full_state_dict_on_rank_0_is_loaded_by_a_plain_model():
    def gather(cluster) -> dict[str, Tensor]:
        model = FullyShardedDataParallel(deep_gpt(cluster.rank + 5))
        return model.full_state_dict()

    state, *nothing = run_ranks(gather, 3)
    assert nothing == [{}, {}]
    plain = deep_gpt(0)
    plain.load_state_dict(state)
    assert_same(parameters(plain), parameters(deep_gpt(5)), rtol=0)


def test_evaluation_leaves_no_block_gathered_and_training_continues():
    def evaluate(cluster) -> None:
        model = FullyShardedDataParallel(deep_gpt(0))
        x, _ = mine(cluster, text())
        with torch.no_grad():
            assert torch.equal(model(x), deep_gpt(0)(x))
        assert not any(unit.is_full for unit in model.units)
        with model.gathered() as module:
            array = module.head.weight.detach().numpy()
        assert np.array_equal(array, deep_gpt(0).head.weight.detach().numpy())  # which is kept
        assert all(unit.full is None for unit in model.units)
        text_loss(model, *mine(cluster, text())).backward()
        model.finish_gradient_sync()

    run_ranks(evaluate, 2)


def test_an_evaluation_between_forward_and_backward_changes_nothing():
    def compare(cluster) -> None:
        for reshard_after_forward in (True, False):
            model = FullyShardedDataParallel(deep_gpt(0), reshard_after_forward=reshard_after_forward)
            reference, (x, y) = deep_gpt(0), mine(cluster, text())
            for _ in range(2):
                model.zero_grad()
                loss = text_loss(model, x, y)
                with torch.no_grad():
                    model(x[:1])
                loss.backward()
                model.finish_gradient_sync()
            text_loss(reference, *text()).backward()
            expected = {name: p.grad for name, p in reference.named_parameters()}
            assert_same(full_tensors(model.pieces, lambda piece: piece.tensor.grad), expected)

    run_ranks(compare, 2)


def test_a_learning_rate_scheduler_works_with_the_sharded_optimizer():
    def schedule(cluster) -> None:
        for stage in STAGES:
            ours, reference = Sharded(stage, Odd(0), "sgd"), Odd(0)
            theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
            schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (ours.optimizer, theirs)]
            for _ in range(3):
                theirs.zero_grad()
                odd_loss(reference, *examples(2)).backward()
                ours.optimizer.zero_grad()
                ours.accumulate(odd_loss, mine(cluster, examples(2)), 1)
                for step in (ours.optimizer, theirs, *schedulers):
                    step.step()
            kept = {k: v for k, v in parameters(reference).items() if k in ours.pieces}
            assert_same(
                full_tensors(ours.pieces, lambda piece: piece.tensor), kept, what=f"{stage}, parameter"
            )

    run_ranks(schedule, 2)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_an_optimizer_that_needs_full_parameters_is_refused(name: str):
    with pytest.raises(WorkbookError, match=f"{name} does not work element by element"):
        refuse_unless_elementwise(getattr(torch.optim, name), {})


def test_elementwise_optimizers_are_allowed():
    names = "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD"
    for name in names.split(" "):
        refuse_unless_elementwise(getattr(torch.optim, name), {"lr": 0.01})


def test_one_backward_too_many_is_refused_in_one_sentence():
    def twice(cluster, cls) -> None:
        model = Odd(0)
        cls(model.parameters(), torch.optim.SGD, lr=0.1)
        for _ in range(2):
            odd_loss(model, *examples(2)).backward()

    for cls in (ZeroOptimizer, ZeroGradientOptimizer):
        with pytest.raises(RankError, match=r"Another backward began before finish_gradient_sync\(\)"):
            run_ranks(twice, 2, cls)


def test_ranks_that_ran_different_blocks_or_another_order_are_all_refused():
    class Chosen(Blocks):
        def forward(self, x: Tensor, names: str) -> Tensor:
            for name in names:
                x = self.blocks[int(name)](x)
            return x

    def differ(cluster, names: tuple[str, str]) -> None:
        model = FullyShardedDataParallel(Chosen())
        for _ in range(2):
            model(torch.ones(2, 8), names[cluster.rank]).sum().backward()
            model.finish_gradient_sync()

    for names, sentence in (
        (("01", "02"), "ran different blocks"),
        (("012", "021"), "ran different blocks"),
        (("0112", "012"), "The ranks do not fit together"),  # different numbers of collectives
    ):
        for error in run_ranks(differ, 2, names, collect_failures=True, group_timeout=20):
            assert isinstance(error, RankError) and sentence in str(error)


class Twofold(nn.Module):
    """A block that has two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.one(pair[1]), torch.tanh(self.other(pair[0]))


class Pairs(nn.Module):
    """A model of blocks with two outputs, one of which runs twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Twofold() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, 2 * x)
        for i in (0, 1, 0):
            pair = self.blocks[i](pair)
        return pair[0] + pair[1]


def test_blocks_may_have_several_outputs_and_be_run_several_times():
    def compare(cluster) -> None:
        batch = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(0)).double(), torch.ones(BATCH)
        compare_with_one_process(
            cluster, "zero3", "sgd", Pairs, lambda model, x, _: model(x).square().mean(), batch
        )

    run_ranks(compare, 2)


def test_an_optimizer_without_a_trained_parameter_is_refused():
    def nothing(cluster) -> None:
        ZeroOptimizer(Blocks().requires_grad_(False).parameters(), torch.optim.SGD, lr=0.1)

    with pytest.raises(RankError, match="ZeroOptimizer was given no parameter that is trained"):
        run_ranks(nothing, 2)

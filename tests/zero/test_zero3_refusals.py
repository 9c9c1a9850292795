"""Test that ZeRO stage 3 refuses what it cannot do, in one sentence and on all ranks."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import mean_square
from tests.zero.zero3_models import linear, mlp, numbers
from zero.train_zero3 import FullyShardedDataParallel

Model = FullyShardedDataParallel


def save(model: Model) -> None:
    torch.save(model.state_dict(), io.BytesIO())


def optimizer_of_the_module(model: Model) -> None:
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    mean_square(model, numbers()).backward()
    model.finish_gradient_sync()
    optimizer.step()


def a_change_inside_gathered(model: Model) -> None:
    with model.gathered() as module:
        nn.init.zeros_(module[0].weight)


def a_step_before_the_backward(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_square(model, numbers()).backward()
    model.finish_gradient_sync()
    loss = mean_square(model, numbers())
    optimizer.step()
    loss.backward()


def a_penalty(model: Model) -> None:
    (mean_square(model, numbers()) + sum(p.square().sum() for p in model.parameters())).backward()


def then_train(change: Callable[[Model], object]) -> Callable[[Model], None]:
    def step(model: Model) -> None:
        change(model)
        mean_square(model, numbers()).backward()

    return step


def assign(model: Model) -> None:
    model.module[0].weight = nn.Parameter(torch.zeros(6, 6).double())


def other_memory(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.float()


REFUSED: dict[str, list[Callable[[Model], object]]] = {
    r"call full_state_dict\(\) on all ranks": [
        save,
        lambda model: model.state_dict()["module.0.weight"].sum(),
    ],
    "load it into the module before wrapping": [lambda model: model.load_state_dict(mlp().state_dict())],
    "neither moved nor cast": [nn.Module.float, lambda model: model.to(torch.bfloat16), nn.Module.half],
    "neither copied nor pickled": [copy.deepcopy, lambda model: torch.save(model, io.BytesIO())],
    r"0.weight is sharded, .* inside gathered\(\)": [
        lambda model: model.module[0].weight.norm(),
        lambda model: model.module[0].weight.data,
        lambda model: model.module[0].weight[0],
        lambda model: torch.cat([model.module[0].weight]),
        lambda model: nn.init.normal_(model.module[0].weight),
        lambda model: model.module.state_dict(),
        lambda model: model.module.load_state_dict(mlp().state_dict()),
        lambda model: model.module.float(),
        lambda model: copy.deepcopy(model.module),
        lambda model: model.module.requires_grad_(False),
        lambda model: torch.save(model.module, io.BytesIO()),
        lambda model: model.module[0].forward(numbers()),
        lambda model: torch.optim.SGD(model.module.parameters(), lr=0.1).zero_grad(),
        optimizer_of_the_module,
    ],
    "A block was called by itself": [lambda model: model.module(numbers())],
    r"was changed inside gathered\(\)": [a_change_inside_gathered],
}
BEFORE_THE_STEP = {"The parameters have changed since the forward": [a_step_before_the_backward]}
PENALTIES = {"The loss uses this rank's shard of": [a_penalty]}
CHANGES = {
    "0.weight was added, replaced or removed after": [then_train(assign)],
    "more was added, replaced or removed after": [
        then_train(lambda model: setattr(model, "more", linear())),
        then_train(lambda model: model.module.register_parameter("more", nn.Parameter(torch.ones(1)))),
        then_train(lambda model: model.module.add_module("more", linear())),
    ],
    "was given other memory after": [then_train(other_memory)],
    "2.weight was unfrozen after": [then_train(nn.Module.requires_grad_)],
}


def check_refused(refused: dict[str, list[Callable[[Model], object]]]) -> None:
    def work(cluster) -> None:
        model = FullyShardedDataParallel(mlp())
        for sentence, actions in refused.items():
            for action in actions:
                if refused is CHANGES:
                    module = mlp()
                    module[2].weight.requires_grad_("unfrozen" not in sentence)
                    model = FullyShardedDataParallel(module)
                with pytest.raises((WorkbookError, RuntimeError), match=sentence):
                    action(model)
                model.finish_gradient_sync()
                with torch.no_grad():
                    assert model(numbers()).isfinite().all()

    run_ranks(work, 2)


def test_uses_that_would_crash_or_save_half_a_model_are_refused_on_all_ranks():
    check_refused(REFUSED)


def test_a_backward_after_the_optimizers_step_is_refused():
    check_refused(BEFORE_THE_STEP)


def test_a_penalty_on_the_shards_is_refused():
    check_refused(PENALTIES)


def test_a_module_that_was_changed_after_wrapping_is_refused():
    check_refused(CHANGES)


def test_an_optimizer_made_before_wrapping_is_refused_at_its_first_step():
    def work(cluster) -> None:
        module = mlp()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = FullyShardedDataParallel(module)
        mean_square(model, numbers()).backward()
        model.finish_gradient_sync()
        for use in (optimizer.step, optimizer.zero_grad):
            with pytest.raises(WorkbookError, match=r"train and freeze what parameters\(\) yields"):
                use()

    run_ranks(work, 2)


def test_an_activation_that_was_changed_in_place_raises_torchs_own_error():
    class InPlace(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).sigmoid()
            z = y * 2
            y += 1
            return z

    def work(cluster) -> None:
        model = FullyShardedDataParallel(InPlace(6, 6).double())
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            mean_square(model, numbers()).backward()

    run_ranks(work, 2)

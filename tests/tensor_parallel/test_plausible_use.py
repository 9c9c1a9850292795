"""Test that programs which a course uses run with tensor parallel models as in one process."""

import pytest
import torch
from torch import nn

from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP, loss_of
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tensor_parallel.parallel_model import TensorParallel
from tensor_parallel.parallelize import parallelize
from tests.gradient_changes import Change, halved, set_to_none, zeroed_in_place
from tests.tensor_parallel.equivalence import RTOL, full_tensors, gathered, gpt, text

# Each `backward` has another batch; the other items change the gradients or synchronise them.
PROGRAMS: list[list[str | Change]] = [
    ["backward", "finish", "backward", "finish"],
    ["backward", "finish", "finish"],
    ["backward", "backward", "finish", "backward", "finish", "backward", "backward", "finish"],
    ["backward", "finish", set_to_none, "backward", "finish"],
    ["backward", "finish", zeroed_in_place, "backward", "finish"],
    ["backward", "finish", halved, "backward", "finish"],
    ["backward", set_to_none, "backward", "finish"],
    ["backward", "finish", "backward", set_to_none, "backward", "finish"],
    ["finish", "backward", "finish"],
]


def compare_program(cluster: Cluster, program: list[str | Change], sequence_parallel: bool) -> None:
    plain, ours = gpt(num_layers=1), parallelize(gpt(num_layers=1), None, sequence_parallel)
    x, _ = text()
    for number, what in enumerate(program):
        tokens = (x + number) % 61
        if what == "backward":
            loss_of(plain(tokens), tokens).backward()
            ours.loss(ours(tokens), tokens).backward()
        elif what == "finish":
            ours.finish_gradient_sync()
        else:
            what(plain)
            what(ours)
    found = full_tensors(ours, gradients(ours.module))
    assert_same(found, gradients(plain), RTOL, f"gradient, {program}, sequence_parallel {sequence_parallel},")


def test_gradients_are_complete_for_any_order_of_backwards_zeroing_and_synchronisation():
    def work(cluster: Cluster) -> None:
        for program in PROGRAMS:
            compare_program(cluster, program, True)
        compare_program(cluster, PROGRAMS[2], False)

    run_ranks(work, 2)


def test_gradients_of_norms_count_once_after_two_accumulated_steps():
    run_ranks(lambda cluster: compare_program(cluster, PROGRAMS[0], True), 2, timeout=20)


def test_a_second_finish_gradient_sync_sends_nothing():
    def work(cluster: Cluster) -> None:
        ours = parallelize(gpt(num_layers=1), None, True)
        x, y = text()
        ours.loss(ours(x), y).backward()
        ours.finish_gradient_sync()
        before = LEDGER.total()
        ours.finish_gradient_sync()
        assert LEDGER.total() == before

    run_ranks(work, 2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, after: Change = set_to_none, steps: int = 3
) -> dict[str, torch.Tensor | None]:
    """Take a few steps, call `after` after the first, and return the last gradients."""
    for step in range(steps):
        x, y = text()
        optimizer.zero_grad()
        is_parallel = isinstance(model, TensorParallel)
        loss = model.loss(model(x), y) if is_parallel else loss_of(model(x), y)
        loss.backward()
        if is_parallel:
            model.finish_gradient_sync()
        optimizer.step()
        if step == 0:
            after(model)
    module = model.module if isinstance(model, TensorParallel) else model
    return gradients(module)


def test_an_optimizer_made_before_parallelize_trains_the_shards():
    def work(cluster: Cluster) -> None:
        for kind, options in ((torch.optim.SGD, {"lr": 0.3}), (torch.optim.AdamW, {"lr": 0.01})):
            for sequence_parallel in (False, True):
                plain, cut = gpt(num_layers=1), gpt(num_layers=1)
                optimizers = [kind(model.parameters(), **options) for model in (plain, cut)]
                loss_of(cut(text()[0]), text()[1]).backward()  # of the plain model: not a part's gradient
                ours = parallelize(cut, None, sequence_parallel)
                assert all(parameter.grad is None for parameter in ours.parameters())
                train(plain, optimizers[0])
                train(ours, optimizers[1])
                # AdamW divides small gradients by their size, and so makes rounding larger.
                rtol = RTOL if kind is torch.optim.SGD else 1e-6
                found = full_tensors(ours, parameters(ours.module))
                assert_same(found, parameters(plain), rtol, f"parameter, {kind}, {sequence_parallel},")

    run_ranks(work, 2)


def freeze(model: nn.Module) -> None:
    """Freeze other parameters than at the beginning."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name or "norm" in name)


def assign(model: nn.Module) -> None:
    module = model.module if isinstance(model, TensorParallel) else model
    module.load_state_dict(
        {name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True
    )


def cast(model: nn.Module) -> None:
    model.float().double()


def test_parameters_frozen_assigned_or_cast_after_parallelize_train_as_in_one_process():
    def work(cluster: Cluster) -> None:
        for change in (freeze, assign, cast):
            for sequence_parallel in (False, True):
                plain, cut = gpt(num_layers=1, tied=False), gpt(num_layers=1, tied=False)
                for model in (plain, cut):
                    model.blocks[0].mlp.requires_grad_(False)
                    model.final_norm.requires_grad_(False)
                ours = parallelize(cut, None, sequence_parallel)

                def after(model: nn.Module) -> None:
                    change(model)
                    optimizer.param_groups.clear()
                    optimizer.add_param_group({"params": [*model.parameters()], "lr": 0.3})

                found = []
                for model in (plain, ours):
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
                    found.append(train(model, optimizer, after))
                is_trained = found[0]["blocks.0.mlp.up_proj.weight"] is not None
                assert is_trained == (change is freeze)
                what = f"gradient, {change.__name__}, sequence_parallel {sequence_parallel},"
                rtol = 1e-4 if change is cast else RTOL
                assert_same(full_tensors(ours, found[1]), found[0], rtol, what)

    run_ranks(work, 2)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_the_norm_includes_sparse_and_complex_gradients():
    def work(cluster: Cluster) -> None:
        plain, ours = gpt(num_layers=1), parallelize(gpt(num_layers=1))
        for model in (plain, ours.module):
            model.position_embedding.sparse = True
        x, y = text()
        loss_of(plain(x), y).backward()
        ours.loss(ours(x), y).backward()
        assert ours.module.position_embedding.weight.grad.is_sparse
        expected = torch.stack([p.grad.to_dense().norm() for p in plain.parameters()]).norm()
        assert_same({"norm": ours.clip_grad_norm_(1e-3)}, {"norm": expected}, RTOL)
        clipped = {"position": ours.module.position_embedding.weight.grad.to_dense()}
        right = {"position": plain.position_embedding.weight.grad.to_dense() * 1e-3 / (expected + 1e-6)}
        assert_same(clipped, right, RTOL)

        plain, ours = (MLP([4, 6]).to(torch.complex128) for _ in range(2))
        ours = parallelize(ours)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) * (1 + 2j)
        for model in (plain, ours):
            y = model(x.to(torch.complex128))
            (y.real * y.imag).sum().backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_same({"norm": ours.clip_grad_norm_(0.1)}, {"norm": expected}, RTOL)
        for name, parameter in plain.named_parameters():
            part = gathered(ours.module.get_parameter(name).grad, 0)
            torch.testing.assert_close(part, parameter.grad, rtol=1e-9, atol=0)

    run_ranks(work, 2)


def test_a_refused_model_is_unchanged_and_a_parallel_one_is_not_parallelized_again():
    def work(cluster: Cluster) -> list[str]:
        sentences = []
        model, tuned = MLP([4, 8, 4, 9]), MLP([4, 8])
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        nn.utils.parametrizations.weight_norm(tuned.layers[0])
        for one in (model, parallelize(gpt(num_layers=1)).module, parallelize(MLP([4, 8])).module, tuned):
            with pytest.raises(WorkbookError) as error:
                parallelize(one)
            sentences.append(str(error.value))
        assert_same(dict(model.state_dict()), before, 0)
        return sentences

    first, second = run_ranks(work, 2)
    again = "The model is tensor parallel already: parallelize a plain one."
    computed = "A weight that is computed from others cannot be divided: remove parametrizations."
    assert first == second == ["9 outputs cannot be divided among 2 ranks equally.", again, again, computed]


def test_a_head_with_a_bias_is_sharded_and_saved():
    def work(cluster: Cluster) -> None:
        plain, cut = gpt(num_layers=1), gpt(num_layers=1)
        for model in (plain, cut):
            model.head.bias = nn.Parameter(torch.linspace(-1, 1, 61).double())
        ours = parallelize(cut)
        x, y = text()
        loss_of(plain(x), y).backward()
        ours.loss(ours(x), y).backward()
        assert_same(full_tensors(ours, gradients(ours.module)), gradients(plain), RTOL)
        state = ours.full_state_dict()
        assert_same(state, plain.state_dict(), 0)
        ours.load_full_state_dict({name: tensor + 1 for name, tensor in state.items()})
        assert_same({"bias": gathered(ours.module.head.bias, 0)[:61]}, {"bias": plain.head.bias + 1}, 0)

    run_ranks(work, 2)

"""Test that stage 3 refuses in a sentence, on all ranks, and that what torch's tools see of it is right."""

import copy
import io
import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from comm.errors import CommError
from data_parallel.train_zero3 import FullyShardedDataParallel
from lab.check import assert_same
from lab.errors import WorkbookError
from lab.ranks import run_ranks
from lab.text import rank_slice
from tests.data_parallel.sharded import whole
from tests.data_parallel.test_zero3_loops import linear, mean_square, numbers


def make() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear())


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
    "load it into the module before wrapping": [lambda model: model.load_state_dict(make().state_dict())],
    "neither moved nor cast": [nn.Module.float, lambda model: model.to(torch.bfloat16), nn.Module.half],
    "neither copied nor pickled": [copy.deepcopy, lambda model: torch.save(model, io.BytesIO())],
    r"0.weight is sharded, .* inside gathered\(\)": [
        lambda model: model.module[0].weight.norm(),
        lambda model: model.module[0].weight.data,
        lambda model: model.module[0].weight[0],
        lambda model: torch.cat([model.module[0].weight]),
        lambda model: nn.init.normal_(model.module[0].weight),
        lambda model: model.module.state_dict(),
        lambda model: model.module.load_state_dict(make().state_dict()),
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
        model = FullyShardedDataParallel(make())
        for sentence, actions in refused.items():
            for action in actions:
                if refused is CHANGES:
                    module = make()
                    module[2].weight.requires_grad_("unfrozen" not in sentence)
                    model = FullyShardedDataParallel(module)
                with pytest.raises((WorkbookError, RuntimeError), match=sentence):
                    action(model)
                model.finish_gradient_sync()
                with torch.no_grad():
                    assert model(numbers()).isfinite().all()

    run_ranks(work, 2)


def test_what_would_end_the_process_or_save_half_a_model_is_refused_by_all_ranks():
    check_refused(REFUSED)


def test_a_backward_after_the_optimizers_step_is_refused():
    check_refused(BEFORE_THE_STEP)


def test_a_penalty_on_the_pieces_is_refused():
    check_refused(PENALTIES)


def test_what_is_changed_after_wrapping_is_refused():
    check_refused(CHANGES)


def test_an_optimizer_made_before_wrapping_is_refused_at_its_first_step():
    def work(cluster) -> None:
        module = make()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = FullyShardedDataParallel(module)
        mean_square(model, numbers()).backward()
        model.finish_gradient_sync()
        for use in (optimizer.step, optimizer.zero_grad):
            with pytest.raises(WorkbookError, match=r"train and freeze what parameters\(\) yields"):
                use()

    run_ranks(work, 2)


def test_what_is_known_of_a_parameter_without_its_numbers_is_told():
    def work(cluster) -> None:
        plain, model = linear(), FullyShardedDataParallel(linear())
        weight = model.module.weight
        assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
        for about in ("shape", "dtype", "device", "ndim", "nbytes"):
            assert getattr(weight, about) == getattr(plain.weight, about)
        assert (weight.numel(), weight.size(0), weight.dim(), len(weight)) == (36, 6, 2, 6)
        assert weight.new_zeros(3).tolist() == [0.0] * 3
        assert repr(weight) == "Freed(shape=(6, 6), dtype=torch.float64)"
        assert model.to("cpu").double() is model

    run_ranks(work, 2)


def test_memory_that_a_forward_has_left_behind_stays_readable():
    class Keeps(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self[0].weight.detach()[0]
            return super().forward(x)

    def work(cluster) -> None:
        torch.manual_seed(0)
        module = Keeps(linear(), linear())
        expected = module[0].weight.detach()[0].clone()
        model = FullyShardedDataParallel(module)
        mean_square(model, numbers()).backward()
        model.finish_gradient_sync()
        assert torch.equal(module.kept, expected)

    run_ranks(work, 2)


def test_a_saved_activation_that_was_changed_in_place_is_told_as_torch_tells_it():
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


class Breaks(nn.Module):
    """A block whose forward or backward raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.when = linear(), ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ValueError("as it was told")
        y = self.inner(x)
        if self.when == "backward":
            y.register_hook(self.refuse)
        return y.sin()

    def refuse(self, gradient: Tensor) -> None:
        raise ValueError("as it was told")


def test_after_an_exception_in_any_pass_the_next_step_is_right():
    def work(cluster) -> None:
        for broken, finishes in ((0, True), (1, False), (2, True), (2, False)):
            for when in ("forward", "backward"):
                torch.manual_seed(0)
                module = nn.Sequential(*(Breaks() for _ in range(3)))
                reference = copy.deepcopy(module)
                model = FullyShardedDataParallel(module)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                mine = rank_slice(numbers(), cluster.rank, cluster.world_size)
                mean_square(model, 5 * mine).backward()  # a microbatch before it
                module[broken].when = when
                with pytest.raises(ValueError, match="as it was told"):
                    mean_square(model, mine).backward()
                module[broken].when = ""
                if finishes:
                    model.finish_gradient_sync()
                optimizer.zero_grad()
                mean_square(model, mine).backward()
                model.finish_gradient_sync()
                mean_square(reference, numbers()).backward()
                expected = {name: p.grad for name, p in reference.named_parameters()}
                assert_same(whole(model.pieces, lambda piece: piece.tensor.grad), expected, what=when)

    run_ranks(work, 2)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_dies_in_a_step_is_named_in_one_sentence(when: str):
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(cluster) -> str:
        module = nn.Sequential(*(Breaks() for _ in range(3)))
        model = FullyShardedDataParallel(module)
        mean_square(model, numbers()).backward()  # the next one gathers blocks ahead
        model.finish_gradient_sync()
        if cluster.rank == 1 and when == "forward":
            module[1].register_forward_pre_hook(die)
        elif cluster.rank == 1:
            module[1].register_full_backward_hook(die)
        with pytest.raises(CommError) as error:
            mean_square(model, numbers()).backward()
            model.finish_gradient_sync()
        return str(error.value)

    survivor, _ = run_ranks(work, 2, group_timeout=40, collect_failures=True)
    assert isinstance(survivor, str), survivor
    assert "rank 1 has died" in survivor and "\n" not in survivor


def test_torchs_own_clipping_takes_the_norm_over_all_ranks():
    def work(cluster) -> None:
        for norm_type in (2.0, 1.0, 3.0, float("inf")):
            torch.manual_seed(0)
            reference = make()
            model = FullyShardedDataParallel(copy.deepcopy(reference))
            mean_square(reference, numbers()).backward()
            mean_square(model, rank_slice(numbers(), cluster.rank, cluster.world_size)).backward()
            model.finish_gradient_sync()
            norms = {
                name: nn.utils.clip_grad_norm_(m.parameters(), 1e-3, norm_type)
                for name, m in (("ours", model), ("theirs", reference))
            }
            assert_same({"norm": norms["ours"]}, {"norm": norms["theirs"]}, what=str(norm_type))
            expected = {name: p.grad for name, p in reference.named_parameters()}
            assert_same(whole(model.pieces, lambda piece: piece.tensor.grad), expected, what=str(norm_type))

    run_ranks(work, 3)


def test_a_grad_scaler_skips_a_step_on_all_ranks_or_on_none():
    """The infinity is in one parameter's gradient, so in one rank's shard."""

    def work(cluster) -> list[tuple[float, bool]]:
        model = FullyShardedDataParallel(nn.Linear(4, 1))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 4.0)
        seen = []
        for largest in (float("inf"), 1.0):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            scaler.scale(model(torch.tensor([[largest, 1.0, 1.0, 1.0]])).sum()).backward()
            model.finish_gradient_sync()
            scaler.step(optimizer)
            scaler.update()
            stepped = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            seen.append((scaler.get_scale(), any(stepped)))
        return seen

    assert run_ranks(work, 2) == [[(2.0, False), (2.0, True)]] * 2


class Mixed(nn.Module):
    """Numbers of every kind: integers, complex ones, and floating-point ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([257, 1003]), requires_grad=False)
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.table.tolist() == [257, 1003] and self.phase.dtype == torch.complex64
        y = self.layer(x)
        assert y.dtype == torch.bfloat16
        return y, (self.phase * self.phase.conj() * 2).abs().square().sum(), self.table + 1


def test_compute_dtype_leaves_integers_and_complex_numbers_and_the_output_gets_the_models_dtype():
    def work(cluster) -> None:
        torch.manual_seed(0)
        plain = Mixed()
        model = FullyShardedDataParallel(copy.deepcopy(plain), compute_dtype=torch.bfloat16)
        y, energy, table = model(torch.ones(3, 2))
        assert (y.dtype, table.dtype) == (torch.float32, torch.int64)
        energy.backward()
        model.finish_gradient_sync()
        norms = model.clip_grad_norm_(1e9), nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        expected = 2 * (plain.phase * plain.phase.conj() * 2).abs().square().sum()
        (gradient,) = torch.autograd.grad(expected / 2, plain.phase)
        for norm in norms:
            assert_same({"norm": norm}, {"norm": gradient.abs().square().sum().sqrt()}, rtol=1e-5)

    run_ranks(work, 2)


def test_a_float16_mean_that_fits_does_not_overflow():
    def work(cluster) -> None:
        model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), compute_dtype=torch.float16)
        (model(torch.ones(1, 1)) * 40000.0).sum().backward()
        model.finish_gradient_sync()
        assert whole(model.pieces, lambda piece: piece.tensor.grad)["weight"].item() == 40000.0

    run_ranks(work, 3)


def test_a_full_state_dict_has_the_buffers_that_are_saved():
    def work(cluster) -> None:
        module = nn.BatchNorm1d(2)
        module.register_buffer("scratch", torch.ones(1), persistent=False)
        state = FullyShardedDataParallel(module).full_state_dict()
        if cluster.is_main:
            nn.BatchNorm1d(2).load_state_dict(state)

    run_ranks(work, 2)

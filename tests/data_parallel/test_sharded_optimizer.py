"""How stages 1 and 2 are used: what torch's optimizers allow is right too, or refused in a sentence."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel.train_zero1 import ZeroOptimizer
from data_parallel.train_zero2 import ZeroGradientOptimizer
from lab.check import assert_same, parameters, reference_gradients
from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.ranks import run_ranks
from pipeline_parallel.deferred import Jobs, deferring
from tests.data_parallel.equivalence import mine, square
from tests.data_parallel.sharded import whole
from tests.data_parallel.test_use import Complex, HasNone, X, layers

BOTH = (ZeroOptimizer, ZeroGradientOptimizer)


def averaged(model: nn.Module, optimizer: Any) -> dict[str, Tensor | None]:
    """The mean gradients, in full."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return whole(
        {names[piece.parameter]: piece for piece in optimizer.pieces}, lambda piece: piece.tensor.grad
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    square(model, x).backward()
    optimizer.step()


def test_a_group_that_is_added_later_is_trained_as_in_one_process():
    def unfreeze_step_by_step(make: Callable[..., torch.optim.Optimizer], seed: int, x: Tensor) -> nn.Module:
        model = layers(seed)
        model[0].requires_grad_(False)
        optimizer = make(model.parameters())
        train(model, optimizer, x)
        train(model, optimizer, x)
        model[0].requires_grad_(True)
        model.append(nn.Linear(3, 3).double())
        torch.manual_seed(seed + 7)
        nn.init.normal_(model[3].weight)
        nn.init.zeros_(model[3].bias)
        if isinstance(optimizer, BOTH):
            optimizer.zero_grad()
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
            optimizer.add_param_group({"params": [model[3].weight, model[3].bias]})
        else:
            optimizer.param_groups[0]["params"] = list(model[2].parameters())
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
            optimizer.add_param_group({"params": model[3].parameters()})
        train(model, optimizer, x)
        train(model, optimizer, x)
        return model

    def work(cluster: Cluster) -> None:
        reference = unfreeze_step_by_step(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0, X)
        for cls in BOTH:
            model = unfreeze_step_by_step(
                lambda p, cls=cls: cls(p, torch.optim.SGD, lr=0.1, momentum=0.9),
                cluster.rank,
                *mine(cluster, (X,)),
            )
            assert_same(parameters(model), parameters(reference), what=f"parameter, {cls.__name__},")

    for n in (1, 3):
        run_ranks(work, n)


def test_a_group_that_cannot_be_added_is_refused():
    def work(cluster: Cluster) -> None:
        for cls in BOTH:
            model = layers()
            optimizer = cls(model[0].parameters(), torch.optim.SGD, lr=0.1)
            with pytest.raises(WorkbookError, match="was given a parameter that another group has"):
                optimizer.add_param_group({"params": model.parameters()})
            square(model, X).backward()
            with pytest.raises(
                WorkbookError, match=r"came in the middle of a step: call it after zero_grad\(\)"
            ):
                optimizer.add_param_group({"params": model[2].parameters()})
            optimizer.zero_grad()

    run_ranks(work, 2)


def test_the_state_of_another_rank_is_refused_on_all_and_ones_own_goes_on():
    def work(cluster: Cluster) -> None:
        for cls in BOTH:
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
            train(model, optimizer, *mine(cluster, (X,)))
            own, at_first = copy.deepcopy(optimizer.state_dict()), parameters(model)
            rank_0s = [own]
            dist.broadcast_object_list(rank_0s, src=0)
            plain = torch.optim.SGD(layers().parameters(), lr=0.1, momentum=0.9).state_dict()
            for state in (rank_0s[0], plain):  # rank 0 was given its own, and is told all the same
                with pytest.raises(WorkbookError, match="fits its own rank of an equal run only"):
                    optimizer.load_state_dict(state)
            train(model, optimizer, *mine(cluster, (X,)))

            resumed = layers()
            resumed.load_state_dict(at_first)
            again = cls(resumed.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9)
            again.load_state_dict(own)
            train(resumed, again, *mine(cluster, (X,)))
            assert_same(parameters(resumed), parameters(model), 0, f"parameter, {cls.__name__},")

    run_ranks(work, 2)


def test_torchs_own_clipping_is_refused_and_the_optimizers_own_is_right():
    def work(cluster: Cluster) -> None:
        reference = layers()
        square(reference, X).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        for cls in BOTH:
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            square(model, *mine(cluster, (X,))).backward()
            for sync in (lambda: None, optimizer.finish_gradient_sync):
                sync()
                for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
                    with pytest.raises(
                        WorkbookError, match=r"clip with the optimizer's own clip_grad_norm_\(\)"
                    ):
                        clip(model.parameters(), 0.01)
            norm = optimizer.clip_grad_norm_(0.01)
            assert_same({"norm": norm}, {"norm": expected})
            gradients = {name: p.grad for name, p in reference.named_parameters()}
            assert_same(averaged(model, optimizer), gradients, what=f"gradient, {cls.__name__},")
            model.zero_grad()
            with pytest.raises(WorkbookError, match=r"call zero_grad\(\) in between"):
                square(model, X).backward()

    run_ranks(work, 2)


class Apart(nn.Module):
    """Two layers with gradients of their own; what is infinite reaches only the first one's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = (nn.Linear(3, 2, bias=False).double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x.nan_to_num(posinf=1.0))], dim=1)


def test_a_grad_scaler_skips_the_step_on_all_ranks_when_one_has_inf():
    def scaled(
        model: nn.Module, optimizer: torch.optim.Optimizer, xs: list[Tensor], unscales: bool
    ) -> list[float]:
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2), []
        for x in xs:
            optimizer.zero_grad()
            scaler.scale(square(model, x)).backward()
            if unscales:
                if isinstance(optimizer, BOTH):
                    optimizer.finish_gradient_sync()
                scaler.unscale_(optimizer)
                if isinstance(optimizer, BOTH):
                    optimizer.clip_grad_norm_(0.1)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    def work(cluster: Cluster) -> None:
        with_inf = X.clone()
        with_inf[-1, 0] = torch.inf  # in the last rank's slice, and not in the shards of all ranks
        xs = [X, with_inf, X, X]
        for unscales in (False, True):
            reference = Apart(0)
            expected = scaled(reference, torch.optim.AdamW(reference.parameters(), lr=0.1), xs, unscales)
            assert expected == [4.0, 2.0, 2.0, 4.0]
            for cls in BOTH:
                model = Apart(cluster.rank)
                optimizer = cls(model.parameters(), torch.optim.AdamW, lr=0.1)
                torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps optimizer.step
                slices = [*mine(cluster, xs)]
                assert scaled(model, optimizer, slices, unscales) == expected, cls.__name__
                assert_same(parameters(model), parameters(reference), what=f"parameter, {cls.__name__},")

    run_ranks(work, 3)


def test_several_backwards_in_one_no_sync_and_two_forwards_before_a_backward_add_up():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda m: 3 * square(m, X) + (m(X) * m(2 * X)).mean())
        for cls in BOTH:
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1e-6)
            for is_last_in_no_sync in (False, True):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    for _ in range(3):
                        square(model, x).backward()
                with optimizer.no_sync() if is_last_in_no_sync else contextlib.nullcontext():
                    (model(x) * model(2 * x)).mean().backward()
                optimizer.finish_gradient_sync()
                assert_same(averaged(model, optimizer), expected, what=f"gradient, {cls.__name__},")

    run_ranks(work, 2)


def test_the_loop_of_a_gan_ends_as_on_one_process():
    def gan(make: Callable[..., torch.optim.Optimizer], x: Tensor, seed: int = 0) -> dict[str, Tensor | None]:
        generator, discriminator = layers(seed), layers(seed + 1)
        of_discriminator, of_generator = (make(m.parameters()) for m in (discriminator, generator))
        for _ in range(2):
            of_discriminator.zero_grad()
            square(discriminator, generator(x).detach()).backward()
            of_discriminator.step()
            of_generator.zero_grad()
            square(discriminator, generator(x)).backward()
            of_generator.step()
        return parameters(nn.ModuleList([generator, discriminator]))

    def work(cluster: Cluster) -> None:
        expected = gan(lambda p: torch.optim.SGD(p, lr=0.1), X)
        for cls in BOTH:
            ours = gan(
                lambda p, cls=cls: cls(p, torch.optim.SGD, lr=0.1), *mine(cluster, (X,)), 10 * cluster.rank
            )
            assert_same(ours, expected, what=f"parameter, {cls.__name__},")

    run_ranks(work, 2)


def test_gradients_that_autograd_leaves_out_and_that_come_after_the_backward_are_right():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        without = reference_gradients(HasNone(0), lambda m: square(m, X))
        expected = reference_gradients(layers(), lambda m: square(m, X))
        for cls in BOTH:
            model: nn.Module = HasNone(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                square(model, x).backward()
                optimizer.finish_gradient_sync()
                assert_same(averaged(model, optimizer), without, what=f"gradient, {cls.__name__},")
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                jobs = Jobs()
                for i, part in enumerate(x.chunk(2)):
                    with optimizer.no_sync() if i == 0 else contextlib.nullcontext():
                        with deferring(jobs):
                            loss = square(model, part) / 2
                        loss.backward()
                        jobs.run()
                optimizer.finish_gradient_sync()
                assert_same(averaged(model, optimizer), expected, what=f"gradient, {cls.__name__}, deferred,")

    run_ranks(work, 2)


def test_after_an_error_in_the_backward_finish_and_zero_grad_bring_the_ranks_together_again():
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda m: square(m, X))
        for cls in BOTH:
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1e-6)
            for failing_ranks in ((0, 1), (1,)):
                if cluster.rank in failing_ranks:
                    hook = model[0].weight.register_hook(fail)
                    with pytest.raises(ZeroDivisionError):
                        square(model, x).backward()
                    hook.remove()
                else:
                    square(model, x).backward()
                with pytest.raises(WorkbookError, match="Another backward began before finish_gradient_sync"):
                    square(model, x).backward()
                optimizer.finish_gradient_sync()
                optimizer.zero_grad()
                square(model, x).backward()
                optimizer.finish_gradient_sync()
                assert_same(averaged(model, optimizer), expected, what=f"gradient, {cls.__name__},")
                optimizer.zero_grad()

    run_ranks(work, 2)


def test_a_parameter_that_was_changed_on_one_rank_since_is_refused_on_all():
    def unfreeze(model: nn.Module) -> None:
        model[0].weight.requires_grad_(True)

    def cast(model: nn.Module) -> None:
        model.float()

    def sparse(model: nn.Module) -> None:
        F.embedding(torch.tensor([1]), model[2].weight, sparse=True).sum().backward()

    changes = {
        unfreeze: r"shape \(5, 3\) was unfrozen after the optimizer was made: give it to add_param_group\(\)",
        cast: "was cast or moved after the optimizer was made: make the optimizer again",
        sparse: r"sparse gradient of shape \(3, 5\) came",
    }

    def work(cluster: Cluster) -> None:
        for cls in BOTH:
            for change, sentence in changes.items():
                model = layers()
                model[0].weight.requires_grad_(False)
                optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
                before = parameters(model)
                if cluster.rank == 1:
                    change(model)
                if not (change is sparse and cluster.rank == 1):
                    square(model, X.to(model[2].weight.dtype)).backward()
                own = sentence if cluster.rank == 1 else "another rank refuses"
                with pytest.raises(WorkbookError, match=own):
                    optimizer.step()
                assert_same(parameters(model.double()), before, 1e-6, "parameter")

            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            square(model, X).backward()
            with pytest.raises(WorkbookError, match="make the optimizer again if the model's"):
                optimizer.step()
            again, reference = cls(model.parameters(), torch.optim.SGD, lr=0.1), layers()
            train(model, again, *mine(cluster, (X,)))
            train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), X)
            assert_same(parameters(model), parameters(reference), what=f"parameter, {cls.__name__},")

    run_ranks(work, 2)


def test_complex_parameters_are_trained_and_clipped_as_in_one_process():
    def work(cluster: Cluster) -> None:
        reference = Complex(0)
        square(reference, X).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        for cls in BOTH:
            model = Complex(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            square(model, *mine(cluster, (X,))).backward()
            norm = optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            ours, theirs = (torch.view_as_real(m.weight.detach()) for m in (model, reference))
            assert_same(
                {"norm": norm, "weight": ours}, {"norm": expected, "weight": theirs}, what=cls.__name__
            )

    run_ranks(work, 3)


def test_an_optimizer_that_is_made_again_over_the_same_parameters_takes_them_over():
    def work(cluster: Cluster) -> None:
        for cls in BOTH:
            model, reference = layers(cluster.rank), layers()
            for _ in range(2):
                train(model, cls(model.parameters(), torch.optim.SGD, lr=0.1), *mine(cluster, (X,)))
                train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), X)
            assert_same(parameters(model), parameters(reference), what=f"parameter, {cls.__name__},")

    run_ranks(work, 2)

"""How wrappers are used: loops that DDP allows are right here too, or are refused in a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.check import assert_same, gradients, parameters, reference_gradients
from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.model import MLP, loss_of
from lab.ranks import run_ranks
from pipeline_parallel.deferred import Jobs, deferring
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import zb_h1
from tests.data_parallel.equivalence import OURS, WRAPPERS, Odd, accumulate, examples, mine, odd_loss
from tests.data_parallel.equivalence import square as mean_square

OVERLAPPING = {
    name: OURS[name] for name in ("overlap", "overlap by torch", "a bucket for each", "one bucket")
}
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))  # of ranks
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    mean_square(model, x).backward()
    if hasattr(model, "finish_gradient_sync"):
        model.finish_gradient_sync()
    optimizer.step()


class Flexible(nn.Module):
    """Inputs and outputs of many kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = layers(seed)

    def forward(
        self, x: dict[str, Tensor], factor: Tensor | None, *, bias: Tensor | None = None
    ) -> dict[str, Any]:
        y = self.layers(x["x"]) if factor is None else self.layers(x["x"]) * factor
        return {"y": (y if bias is None else y + bias, None), "of": "any kind"}


def test_inputs_and_outputs_may_be_of_any_kind_and_have_names():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        (first, _), (second, _) = (
            model(*args, **named)["y"]
            for args, named in ((({"x": x}, None), {"bias": x}), (({"x": x}, x), {}))
        )
        return (first * second).mean()

    def work(cluster: Cluster) -> None:
        expected = reference_gradients(Flexible(0), lambda model: loss(model, X))
        for name, wrap in WRAPPERS.items():
            model = wrap(Flexible(cluster.rank))
            loss(model, *mine(cluster, (X,))).backward()
            model.finish_gradient_sync()
            assert_same(gradients(model.module), expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def gan(wrap: Callable[[nn.Module], nn.Module], x: Tensor, seed: int = 0) -> dict[str, Tensor | None]:
    """Two steps of a GAN's loop; the parameters at the end."""
    generator, discriminator = wrap(layers(seed)), wrap(layers(seed + 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (discriminator, generator)]
    for _ in range(2):
        fakes = (lambda: generator(x).detach(), lambda: generator(x))
        for optimizer, trained, fake in zip(optimizers, (discriminator, generator), fakes, strict=True):
            optimizer.zero_grad()
            mean_square(discriminator, fake()).backward()
            if hasattr(trained, "finish_gradient_sync"):
                trained.finish_gradient_sync()
            optimizer.step()
    return parameters(nn.ModuleList([generator, discriminator]))


def test_the_loop_of_a_gan_leaves_gradients_in_the_discriminator_that_are_dropped():
    def work(cluster: Cluster) -> None:
        expected = gan(lambda module: module, X)
        for name, wrap in WRAPPERS.items():
            result = gan(wrap, *mine(cluster, (X,)), 10 * cluster.rank)
            result = {key.replace("module.", ""): value for key, value in result.items()}
            assert_same(result, expected, what=f"parameter of {name}")

    run_ranks(work, 2)


def test_gradients_that_are_zeroed_in_place_while_they_are_sent_are_refused_and_no_sync_helps():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda model: mean_square(model, X))
        for name, wrap in OVERLAPPING.items():
            for with_no_sync in (False, True):
                model = wrap(layers())
                if with_no_sync:
                    with model.no_sync():
                        mean_square(model, x).backward()
                else:
                    mean_square(model, x).backward()
                    model.zero_grad(set_to_none=False)
                    with pytest.raises(
                        WorkbookError, match=r"Another backward began .* inside the discriminator's"
                    ):
                        mean_square(model, x).backward()
                    model.finish_gradient_sync()
                model.zero_grad(set_to_none=False)
                mean_square(model, x).backward()
                model.finish_gradient_sync()
                assert_same(gradients(model.module), expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def test_two_forwards_before_one_backward_and_several_backwards_in_one_no_sync_add_up():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = reference_gradients(layers(), lambda model: (model(X) * model(2 * X)).mean())
        thrice = reference_gradients(layers(), lambda model: 3 * mean_square(model, X))
        for name, wrap in WRAPPERS.items():
            model = wrap(layers(cluster.rank))
            (model(x) * model(2 * x)).mean().backward()
            model.finish_gradient_sync()
            assert_same(gradients(model.module), expected, what=f"gradient of two forwards, {name},")
            model.zero_grad()
            with model.no_sync():
                for _ in range(2):
                    mean_square(model, x).backward()
            mean_square(model, x).backward()
            model.finish_gradient_sync()
            assert_same(gradients(model.module), thrice, what=f"gradient of three backwards, {name},")

    run_ranks(work, 2)


class WithoutWeight(torch.autograd.Function):
    """A function whose backward returns no gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return 2 * dy, None


class HasNone(nn.Module):
    leaves_unused = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers, self.weight = layers(seed), nn.Parameter(torch.ones(3).double())

    def forward(self, x: Tensor) -> Tensor:
        return WithoutWeight.apply(self.layers(x), self.weight)


def test_a_backward_may_return_no_gradient_for_a_parameter():
    def work(cluster: Cluster) -> None:
        expected = reference_gradients(HasNone(0), lambda model: mean_square(model, X))
        for name, wrap in WRAPPERS.items():
            model = wrap(HasNone(cluster.rank))
            for _ in range(2):
                model.zero_grad()
                mean_square(model, *mine(cluster, (X,))).backward()
                model.finish_gradient_sync()
                assert_same(gradients(model.module), expected, what=f"gradient of {name}")

    run_ranks(work, 2)


def test_weight_gradients_that_are_computed_after_the_backward_are_all_in_the_mean():
    """As zero bubble schedules do in pipelines: no hook tells of them."""

    def work(cluster: Cluster) -> None:
        expected = reference_gradients(layers(), lambda model: mean_square(model, X))
        parts = mine(cluster, (X,))[0].chunk(2)
        for name, wrap in OURS.items():
            model = wrap(layers(cluster.rank))
            for in_no_sync in (True, False):
                for step in range(3):
                    model.zero_grad(set_to_none=step < 2)
                    jobs = Jobs()
                    for part in parts:
                        with deferring(jobs):
                            loss = mean_square(model, part) / len(parts)
                        if in_no_sync:
                            with model.no_sync():
                                loss.backward()
                        else:
                            loss.backward()
                        jobs.run()
                    model.finish_gradient_sync()
                    assert_same(gradients(model.module), expected, what=f"gradient of {name}, step {step},")

    run_ranks(work, 2)


def test_the_stages_of_zero_bubble_pipelines_are_averaged_over_their_replicas():
    x, y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(16) % 3

    def work(cluster: Cluster) -> None:
        pipelines, replicas = ([dist.new_group(ranks) for ranks in groups] for groups in (ROWS, COLUMNS))
        row, column = divmod(cluster.rank, 2)
        expected = reference_gradients(MLP([6, 9, 7, 5, 3]).double(), lambda m: loss_of(m(x), y))
        for name, wrap in OURS.items():
            model, (own_x, own_y) = MLP([6, 9, 7, 5, 3]).double(), (part.chunk(2)[row] for part in (x, y))
            pipeline = Pipeline(model, zb_h1(2, 4), loss_of, own_x[:2], group=pipelines[row])
            wrapper = wrap(pipeline.stages, replicas[column])
            for _ in range(2):
                wrapper.zero_grad()
                with wrapper.no_sync():
                    pipeline.step(own_x, own_y)
                wrapper.finish_gradient_sync()
                own = {key: p.grad for key, p in pipeline.named_own_parameters().items()}
                assert_same(own, {key: expected[key] for key in own}, what=f"gradient of {name}")

    run_ranks(work, 4)


def test_a_step_without_finish_gradient_sync_is_refused():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            for make in (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.AdamW(p, fused=True)):
                model = wrap(layers())
                optimizer, before = make(model.parameters()), parameters(model)
                mean_square(model, *mine(cluster, (X,))).backward()
                with pytest.raises(
                    WorkbookError, match=r"optimizer.step\(\) came before finish_gradient_sync\(\)"
                ):
                    optimizer.step()
                assert_same(parameters(model), before, 0, f"parameter of {name}")
                model.finish_gradient_sync()
                optimizer.step()
                with model.no_sync():  # steps of each rank's own, on purpose
                    mean_square(model, *mine(cluster, (X,))).backward()
                optimizer.step()
                model.zero_grad()
                model.finish_gradient_sync()

    run_ranks(work, 2)


def unfreeze(module: nn.Sequential) -> None:
    module[0].weight.requires_grad_(True)


def assign(module: nn.Sequential) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def cast(module: nn.Sequential) -> None:
    module[2].float().weight.requires_grad_(True)


def add(module: nn.Sequential) -> None:
    module.append(nn.Linear(3, 3).double())


def test_a_parameter_that_is_new_since_the_wrapping_is_refused_and_wrapping_again_helps():
    changes = ((unfreeze, "0.weight"), (assign, "0.bias"), (cast, "2.weight"), (add, "3.weight"))

    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        for name, wrap in OURS.items():
            for change, parameter in changes:
                module = layers(cluster.rank)
                module[0].weight.requires_grad_(False)
                model = wrap(module)
                train(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
                change(module)
                with torch.no_grad():
                    if change is not cast:
                        model(x)
                with pytest.raises(
                    WorkbookError, match=f"{parameter} was unfrozen, replaced, cast, moved or added"
                ):
                    model(x)
                model = wrap(module.double())
                reference = layers()
                if change is add:
                    reference.append(nn.Linear(3, 3).double())
                reference.load_state_dict(module.state_dict())
                for _ in range(2):
                    model.zero_grad()
                    mean_square(model, x).backward()
                    model.finish_gradient_sync()
                    expected = reference_gradients(reference, lambda m: mean_square(m, X))
                    if not module[0].weight.requires_grad:
                        expected["0.weight"] = None
                    assert_same(
                        gradients(module), expected, what=f"gradient of {name} after {change.__name__},"
                    )

    run_ranks(work, 2)


def test_a_parameter_that_is_frozen_after_the_wrapping_has_no_gradient():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            model = wrap(layers(cluster.rank))
            model.module[0].requires_grad_(False)
            mean_square(model, *mine(cluster, (X,))).backward()
            model.finish_gradient_sync()
            expected = reference_gradients(layers(), lambda m: mean_square(m, X))
            assert_same(gradients(model.module), expected | {"0.weight": None, "0.bias": None}, what=name)

    run_ranks(work, 2)


def test_an_optimizer_made_before_the_wrapping_trains_what_is_wrapped():
    def work(cluster: Cluster) -> None:
        reference = layers()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(2):
            train(reference, optimizer, X)
        for name, wrap in WRAPPERS.items():
            module = layers(cluster.rank)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            model = wrap(module)
            for _ in range(2):
                train(model, optimizer, *mine(cluster, (X,)))
            assert_same(parameters(module), parameters(reference), what=f"parameter of {name}")

    run_ranks(work, 2)


def test_sparse_gradients_are_refused_with_advice():
    advice = "has another size on each rank, so it cannot be averaged here; leave sparse=True out"

    def work(cluster: Cluster) -> None:
        for wrap in OURS.values():
            with pytest.raises(WorkbookError, match=f"1 has a sparse gradient: it {advice}"):
                wrap(nn.Sequential(nn.Linear(1, 1), nn.Embedding(5, 2, sparse=True)))
            wrap(nn.Embedding(5, 2, sparse=True).requires_grad_(False))
            model = wrap(nn.Embedding(5, 2))
            with pytest.raises(
                WorkbookError, match=rf"A sparse gradient of shape \(5, 2\) came: it {advice}"
            ):
                F.embedding(torch.tensor([cluster.rank]), model.module.weight, sparse=True).sum().backward()

    run_ranks(work, 2)


def test_after_an_error_in_the_backward_finish_and_zero_grad_bring_the_ranks_together_again():
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def work(cluster: Cluster) -> None:
        batch = examples(cluster.world_size)
        expected = reference_gradients(Odd(0), lambda m: odd_loss(m, *batch))
        for name, wrap in OURS.items():
            model = wrap(Odd(cluster.rank))
            for failing_ranks in ((0, 1), (1,), ()):
                for in_no_sync in (True, False):
                    if cluster.rank in failing_ranks:
                        hook = model.module.first.weight.register_hook(fail)
                        with pytest.raises(ZeroDivisionError):
                            if in_no_sync:
                                with model.no_sync():
                                    odd_loss(model, *mine(cluster, batch)).backward()
                            odd_loss(model, *mine(cluster, batch)).backward()
                        hook.remove()
                    else:
                        odd_loss(model, *mine(cluster, batch)).backward()
                    model.finish_gradient_sync()
                    model.zero_grad()
                    accumulate(model, odd_loss, mine(cluster, batch), 2)
                    assert_same(gradients(model.module), expected, what=f"gradient of {name}")
                    model.zero_grad()

    run_ranks(work, 2)


def test_under_autocast_gradients_are_the_mean_of_what_each_rank_computes():
    def work(cluster: Cluster) -> None:
        module, parts = layers().float(), X.float().chunk(cluster.world_size)

        def computed(model: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
            assert y.dtype == torch.bfloat16
            return y.float().square().mean()

        each = [reference_gradients(module, lambda m, part=part: computed(m, part)) for part in parts]
        mean = {name: sum(own[name] for own in each) / len(each) for name in each[0]}
        for name, wrap in WRAPPERS.items():
            model = wrap(layers(cluster.rank).float())
            for _ in range(2):
                model.zero_grad()
                computed(model, parts[cluster.rank]).backward()
                model.finish_gradient_sync()
                assert_same(gradients(model.module), mean, 1e-6, f"gradient of {name}")

    run_ranks(work, 2)


class Complex(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        numbers = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(seed)).double()
        self.weight = nn.Parameter(torch.view_as_complex(numbers))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight.t()).abs()


def test_complex_gradients_keep_their_imaginary_parts_rounded_or_not_and_are_clipped_as_in_one_process():
    wrappers = {
        name: (wrap, 1e-9)
        for name, wrap in WRAPPERS.items()
        if name not in ("ddp", "overlap by torch", "one bucket")
    }
    wrappers["bf16"] = (lambda module: BucketDataParallel(module, wire_dtype="bf16"), 2**-6)
    wrappers["fp16"] = (lambda module: BucketDataParallel(module, wire_dtype="fp16"), 2**-9)

    def work(cluster: Cluster) -> None:
        reference = Complex(0)
        reference_gradients(reference, lambda m: mean_square(m, X))
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        for name, (wrap, rtol) in wrappers.items():
            model = wrap(Complex(cluster.rank))
            mean_square(model, *mine(cluster, (X,))).backward()
            model.finish_gradient_sync()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            ours, theirs = (torch.view_as_real(m.weight.grad) for m in (model.module, reference))
            assert_same({"weight": ours}, {"weight": theirs}, rtol, f"gradient of {name}")

    run_ranks(work, 2)

"""Test gradients in mixed precision and complex gradients."""

import torch
from torch import Tensor, nn

from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.check import assert_same, gradients, reference_gradients
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import WRAPPERS, mean_square, mine
from tests.data_parallel.small_models import Complex, X, layers


def test_under_autocast_gradients_are_the_mean_over_ranks():
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


def test_complex_gradients_keep_their_imaginary_parts_and_are_clipped_as_in_one_process():
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

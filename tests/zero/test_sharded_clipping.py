"""Test that clipping and scaling in stages 1 and 2 look at the gradients of all ranks."""

import pytest
import torch
from torch import Tensor, nn

from lab.check import assert_same, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import mean_square, mine
from tests.data_parallel.small_models import Complex, X, layers
from tests.zero.sharded import BOTH, averaged


def test_torchs_own_clipping_is_refused_and_the_optimizers_own_is_right():
    def work(cluster: Cluster) -> None:
        reference = layers()
        mean_square(reference, X).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        for cls in BOTH:
            model = layers(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            mean_square(model, *mine(cluster, (X,))).backward()
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
                mean_square(model, X).backward()

    run_ranks(work, 2)


class Apart(nn.Module):
    """Two layers; an infinite input reaches only the first one's gradient."""

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
            scaler.scale(mean_square(model, x)).backward()
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
        with_inf[-1, 0] = torch.inf  # in the last rank's slice, but not in every rank's shard
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


def test_complex_parameters_are_trained_and_clipped_as_in_one_process():
    def work(cluster: Cluster) -> None:
        reference = Complex(0)
        mean_square(reference, X).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        for cls in BOTH:
            model = Complex(cluster.rank)
            optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
            mean_square(model, *mine(cluster, (X,))).backward()
            norm = optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            ours, theirs = (torch.view_as_real(m.weight.detach()) for m in (model, reference))
            assert_same(
                {"norm": norm, "weight": ours}, {"norm": expected, "weight": theirs}, what=cls.__name__
            )

    run_ranks(work, 3)

"""Run train_hybrid.py: each replica has its slice of the batch, and the report is on the full model."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import training.run
from expert_parallel.full_state import FullModel
from hybrid_parallel.arguments import HybridArgs, model_of, moe_of, refuse_options, sizes_of
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh, coordinates_of, drawn
from hybrid_parallel.report import counted_by_axis, drawn_traffic, expert_figures, figures
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from hybrid_parallel.traffic import AXES, ByAxis, traffic_of_axes
from lab.cluster import Cluster
from lab.models.model import GPT, MLP, MLPConfig
from lab.trace.ledger import Traffic
from training.arguments import TrainArgs
from training.evaluation import Sums, sums_of
from training.validate import validate_arguments


def stream_of(rank: int, sizes: ParallelSizes) -> int:
    """Return the number of the stream from which a rank draws its dropout masks.

    Replicas and stages draw masks of their own. The ranks of a tensor group hold the same activations, and
    need the same masks; where each has a part, tensor_parallel/randomness.py gives it a stream of its own.
    """
    return rank // sizes.tensor


class Run(training.run.Run):
    """One rank's side of a training on a mesh."""

    def __init__(self, cluster: Cluster, args: HybridArgs, run_mode: str = "hybrid") -> None:
        super().__init__(cluster, args, run_mode, args.model)
        self._args: HybridArgs = args
        self.mesh = Mesh(cluster, self.sizes)
        self.not_measured = "the axes share a rank's time, and their spans overlap"
        self._expected_of_axes: ByAxis = dict.fromkeys(AXES, Traffic())

    def _validate(self, args: TrainArgs) -> None:
        assert isinstance(args, HybridArgs)
        cluster = self._cluster
        self._shape = model_of(args)
        self.sizes = sizes = sizes_of(args, cluster.world_size)
        refuse_sizes(sizes, self._shape, args.batch_size, cluster.world_size, args.experts)
        self._share = (coordinates_of(cluster.rank, sizes)["data"], sizes.data)
        self._stream = stream_of(cluster.rank, sizes)
        refuse_options(args)
        validate_arguments(args, sizes.data, args.model)
        super()._validate(args)

    def hybrid(self) -> HybridParallel:
        """Return the model on the mesh. Its initial weights are those of the ranks with coordinates 0."""
        seed = self._args.seed + self._cluster.rank % (self.sizes.replicas * self.sizes.tensor)
        model = self._built(seed)
        x, _ = self.batch(0)
        example = x[: len(x) // self.sizes.microbatches]
        moe = moe_of(self._args)
        experts = None if moe is None else Experts(moe, self._args.aux_weight, self._args.seed)
        self._hybrid = HybridParallel(model, self.mesh, example, torch.optim.AdamW, experts, lr=self._args.lr)
        sent = drawn_traffic(self._hybrid, traffic_of_axes(self._hybrid, self._args.clip is not None))
        if self._cluster.is_main and not self._args.json:
            print("\n".join([drawn(self.sizes), "", sent]), flush=True)
        return self._hybrid

    def _built(self, seed: int = 0) -> GPT | MLP:
        """Return the plain model."""
        shape, device = self._shape, self._cluster.device
        return (MLP(shape.sizes, seed) if isinstance(shape, MLPConfig) else GPT(shape, seed)).to(device)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean over replicas of what `HybridParallel.backward` has returned on each rank."""
        return self._hybrid.mean_loss(loss)

    def expect_traffic_of_axes(self, of_the_step: ByAxis) -> None:
        """Add what this rank should send along each axis in a step by the lessons' formulas."""
        for axis, traffic in of_the_step.items():
            self._expected_of_axes[axis] += traffic
            self._expected += traffic

    def sums(self, model: nn.Module, x: Tensor, y: Tensor, counts: Tensor) -> Sums | None:
        """Return a replica's sums on one of its ranks: the last stage's, and there the first tensor rank."""
        hybrid = self._hybrid
        x, y = hybrid.own_tokens(x), hybrid.own_tokens(y)
        with hybrid.in_precision():
            logits = hybrid.pipeline.forward_only(x) if hybrid.pipeline is not None else hybrid.module(x)
        if logits is None:
            return None
        if hybrid.tensor is None:
            return sums_of(logits, y, counts)
        is_first = self.mesh.coordinate("tensor") == 0
        if isinstance(hybrid.plain, MLP):  # every tensor rank has all outputs
            return sums_of(logits, y, counts) if is_first else None
        loss = hybrid.tensor.loss(logits, y).double() * y.numel()
        return torch.stack([loss, torch.zeros_like(loss)]) if is_first else None

    def finish(self, model: nn.Module, **extras: Any) -> dict[str, Any]:
        """Report the full model, put together from all axes. All ranks must call it."""
        state = self._hybrid.full_state_dict()
        full: nn.Module = FullModel(state)
        if self._args.experts == 1:
            full = self._built()
            full.load_state_dict(state)
        sizes = {f"axis_{name}": value for name, value in dataclasses.asdict(self.sizes).items()}
        assert self._meter is not None, "there was no step"
        sent = figures(counted_by_axis(self._meter.traffic), self._expected_of_axes, self.sizes)
        if self._args.experts > 1:
            extras |= expert_figures(self._hybrid)
        return super().finish(full, **sizes, **sent, **extras)

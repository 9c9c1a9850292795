"""Run train_hybrid.py: each replica has its slice of the batch, and the report is on the full model."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import training.run
from hybrid_parallel.arguments import HybridArgs, model_of, sizes_of
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh, drawn
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.model import GPT
from training.arguments import TrainArgs
from training.evaluation import Sums, sums_of


def stream_of(rank: int, sizes: ParallelSizes) -> int:
    """Return the number of the stream from which a rank draws its dropout masks.

    Replicas and stages draw masks of their own. The ranks of a tensor group hold the same activations, and
    need the same masks; where each has a part, tensor_parallel/randomness.py gives it a stream of its own.
    """
    return rank // sizes.tensor


class Run(training.run.Run):
    """One rank's side of a training on a mesh."""

    has_formula = False

    def __init__(self, cluster: Cluster, args: HybridArgs) -> None:
        super().__init__(cluster, args, "hybrid")
        self.mesh = Mesh(cluster, self.sizes)
        self.not_measured = "the axes share a rank's time, and their spans overlap"
        if cluster.is_main and not args.json:
            print(drawn(self.sizes), flush=True)

    def _validate(self, args: TrainArgs) -> None:
        assert isinstance(args, HybridArgs)
        cluster = self._cluster
        self._config = model_of(args)
        self.sizes = sizes = sizes_of(args, cluster.world_size)
        refuse_sizes(sizes, self._config, args.batch_size, cluster.world_size)
        self._share = (cluster.rank // sizes.tensor % sizes.data, sizes.data)
        self._stream = stream_of(cluster.rank, sizes)
        for option in ("checkpoint", "metronome"):
            if getattr(args, option) is not None:
                raise WorkbookError(f"--{option} is not offered by the hybrid training yet; leave it out.")
        super()._validate(args)

    def hybrid(self) -> HybridParallel:
        """Return the model on the mesh. Its initial weights are those of the ranks with coordinates 0."""
        seed = self._args.seed + self._cluster.rank % (self.sizes.data * self.sizes.tensor)
        model = GPT(self._config, seed=seed).to(self._cluster.device)
        x, _ = self.batch(0)
        example = x[: len(x) // self.sizes.microbatches]
        self._hybrid = HybridParallel(model, self.mesh, example, torch.optim.AdamW, lr=self._args.lr)
        return self._hybrid

    def sums(self, model: nn.Module, x: Tensor, y: Tensor, counts: Tensor) -> Sums | None:
        """Return a replica's sums on one of its ranks: the last stage's, and there the first tensor rank."""
        hybrid = self._hybrid
        with hybrid.in_precision():
            logits = hybrid.pipeline.forward_only(x) if hybrid.pipeline is not None else hybrid.module(x)
        if logits is None:
            return None
        if hybrid.tensor is None:
            return sums_of(logits, y, counts)
        loss = hybrid.tensor.loss(logits, y).double() * y.numel()
        is_first = self.mesh.coordinate("tensor") == 0
        return torch.stack([loss, torch.zeros_like(loss)]) if is_first else None

    def finish(self, model: nn.Module, **extras: Any) -> dict[str, Any]:
        """Report the full model, put together from all axes. All ranks must call it."""
        full = GPT(self._config).to(self._cluster.device)
        full.load_state_dict(self._hybrid.full_state_dict())
        sizes = {f"axis_{name}": value for name, value in dataclasses.asdict(self.sizes).items()}
        return super().finish(full, **sizes, **extras)

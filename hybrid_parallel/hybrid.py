"""Train replicas of a model that the other axes have divided: what lessons 2 and 8 do, around all others.

      plain ─► experts, TensorParallel ─► stages ─► HybridParallel: BucketDataParallel or ZeRO (replicas)
      model    train_hybrid.py            stages.py                 gradients averaged over replicas

Each of them answers for its own axis, and hands on to what it wraps: what a rank has of the full state, which
gradients count in the norm, what the loss is. One thing does not compose in this way: the order in which
`backward` completes the gradients of a step, each in its group:

      pipeline    the first and the last stage add up the gradients of an embedding that they share
      data        the replicas, along the data and context axes, take the mean (for an expert, those that
                  hold it); with ZeRO each keeps its shard of the mean; replicas that train alone do nothing
      tensor      undivided parameters (norms, positions, some biases): with sequence parallelism ranks add up
                  their terms; without it, but with --compress, they average what each of them has rounded

Without ZeRO and --compress all are sums, and their order would not matter. With ZeRO only shards are left
after the mean. Two stages have different shards of an embedding that they share, so they add up its gradients
before. The ranks of a tensor group have the same shards of undivided parameters, and add up these afterwards.

Without a pipeline, the mean over replicas begins during the backward of the last microbatch (with ZeRO 2 and
3, of every microbatch). In a pipeline it begins after the last backward of a rank's stages, and so at
different times in different stages.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import all_reduce
from data_parallel.train_bucket_overlap import BucketDataParallel
from hybrid_parallel.context_axis import ContextAxis
from hybrid_parallel.expert_axis import ReplicatedExperts, expert_layers_of
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.stages import OneStage, PipelineStages
from lab.launch.errors import WorkbookError
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from low_communication.train_compressed import CompressedDataParallel
from low_communication.train_local_sgd import LocalSGD
from training import clipping
from training.evaluation import Sums
from training.gradients import average_gradients
from training.state_shards import StateShard, buffer_shards, trained_shards
from training.valid_targets import count_valid
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

OptimizerClass = type[torch.optim.Optimizer]


class Alone:
    """Takes the place of a wrapper of replicas, where there is one replica, or each trains alone."""

    require_backward_grad_sync = False

    def finish_gradient_sync(self) -> None:
        pass

    def traffic(self) -> Traffic:
        return Traffic()


class HybridParallel(nn.Module):
    """Replicas of a model in `stages`, which differ along the data and context axes of `mesh`.

    The first replica's weights are copied to the others. `context` cuts the tokens of full sequences. The
    optimizer is an `optimizer_class` with `options`, for the parameters that this rank trains.
    """

    def __init__(
        self,
        stages: OneStage | PipelineStages,
        mesh: Mesh,
        context: ContextAxis | None,
        example: Tensor,
        optimizer_class: OptimizerClass,
        **options: Any,
    ) -> None:
        super().__init__()
        self.stages, self.layers = stages, stages.layers
        self.plain: Any = stages.layers.plain
        self.pipeline = stages if isinstance(stages, PipelineStages) else None
        self.module: nn.Module = stages
        self.mesh, self.sizes = mesh, mesh.sizes
        self.context = context
        self.example_shape, self.device = example.shape, example.device
        self.local: LocalSGD | None = None  # replicas that train alone
        self.are_equal = True  # the replicas, after the last step
        self.data = self._replicate(optimizer_class, options)
        self.layers.held = self.trained_parameters()
        # Tensor ranks' buckets differ, so a compressor rounds gradients of undivided parameters differently.
        named = self.plain.named_parameters() if self.sizes.compress and self.sizes.tensor > 1 else ()
        is_whole = not self.sizes.sequence_parallel
        self.rounded = [p for name, p in named if is_whole and name not in self.layers.dims]

    def _replicate(self, optimizer_class: OptimizerClass, options: dict[str, Any]) -> Any:
        """Return what keeps the replicas equal: by averaged gradients, or by a stage of ZeRO."""
        group, sizes = self.mesh.replicas, self.sizes
        if sizes.zero in (1, 2):
            sharded = ZeroOptimizer if sizes.zero == 1 else ZeroGradientOptimizer
            self.optimizer: torch.optim.Optimizer = sharded(
                self.module.parameters(), optimizer_class, group, **options
            )
            return self.optimizer
        data: Any = Alone()
        if sizes.zero == 3:
            data = self.module = FullyShardedDataParallel(self.module, group)
        elif sizes.replicas > 1 and (experts := self.mesh.experts) is not None:
            data = ReplicatedExperts(self.module, experts)
        elif sizes.compress:
            data = CompressedDataParallel(self.module, sizes.compress, group)
        elif sizes.sync_every > 1:
            self.local = LocalSGD(self.module, sizes.sync_every, group)
        elif sizes.replicas > 1:
            data = BucketDataParallel(self.module, group)
        self.optimizer = optimizer_class(self.module.parameters(), **options)
        return data

    def backward(self, x: Tensor, y: Tensor, num_targets: float | None = None) -> Tensor:
        """Compute the gradients of this replica's batch, complete them, and return the replica's mean loss.

        With a context axis the batch has full sequences, and the loss is that of this rank's tokens. In a
        pipeline the ranks of the last stage have the loss, and the others zero: see `mean_loss`. If targets
        are ignored (-100) and there is a data axis, give `num_targets`: the mean number of valid targets of
        a replica, valid_targets(y, mesh.data). WorkbookError without it.
        """
        # Gradients that are complete must not be completed again.
        if any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]):
            raise WorkbookError(
                "There are gradients of an earlier backward; call optimizer.zero_grad() first."
            )
        for layer in expert_layers_of(self.stages):
            layer.forget()
        if num_targets is None or self.local is not None:  # a replica that trains alone counts its own
            is_given, num_targets = num_targets is not None, count_valid(y)
            if not is_given and self.sizes.data > 1 and num_targets < y.numel():
                raise WorkbookError(
                    "Some targets are ignored (-100), and replicas may have unequal numbers of others: call "
                    "backward(x, y, valid_targets(y, mesh.data))."
                )
        x, y = self.own_tokens(x), self.own_tokens(y)
        with self.in_precision():
            num_targets /= self.sizes.context
            if self.pipeline is None:
                loss = self._in_one_stage(x, y, num_targets)
            else:
                loss = self._through_stages(self.pipeline, x, y, num_targets)
        self.finish_gradient_sync()
        average_gradients(self.rounded, self.mesh.tensor)
        return loss

    def _in_one_stage(self, x: Tensor, y: Tensor, num_targets: float) -> Tensor:
        parts = microbatches(x, y, self.sizes.microbatches)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for i, (part, targets) in enumerate(parts):
            self.data.require_backward_grad_sync = i == len(parts) - 1 or self.sizes.zero == 2
            loss = self.layers.loss(self.module(part), targets, num_targets)
            loss.backward()
            if self.sizes.zero == 2:  # it has no memory for the gradients of several microbatches
                self.data.finish_gradient_sync()
            total += loss.detach()
        return total

    def _through_stages(self, pipeline: PipelineStages, x: Tensor, y: Tensor, num_targets: float) -> Tensor:
        self.data.require_backward_grad_sync = False
        loss = pipeline.step(x, y, num_targets)
        self.data.require_backward_grad_sync = True
        return torch.zeros((), dtype=torch.float64, device=x.device) if loss is None else loss.double()

    def finish_gradient_sync(self) -> None:
        """Complete the gradients of the backwards: over stages, over replicas, over tensor ranks."""
        for axis in (self.stages, self.data, self.layers):
            axis.finish_gradient_sync()

    def after_step(self, is_last: bool = False) -> None:
        """Average the parameters of replicas that train alone, if it is time or the training ends."""
        if self.local is not None:
            self.are_equal = self.local.after_step(self.optimizer, is_last)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Do what torch's clip_grad_norm_ does on the full model, in which every number counts once.

        axis       what ranks have                                 what is added up
        pipeline   different stages; the tied embedding is on two  all stages, without the later copy
        tensor     parts of the divided parameters; the others,    all parts; the others on the first rank
                   such as LayerNorm's weights, in full
        expert     different experts; the rest in full             all experts; the rest on the first rank
        data       without ZeRO the same gradients                 nothing
                   with ZeRO different shards                      all shards
        """
        trained = self.trained_parameters()
        uncounted = {trained[p] for p in self.stages.counted_elsewhere() if p in trained}
        groups = [*self.stages.norm_groups, *[self.mesh.replicas] * bool(self.sizes.zero)]
        groups = [group for group in groups if dist.get_world_size(group) > 1]
        return clipping.clip_grad_norm_(trained.values(), max_norm, groups, norm_type, uncounted, self.device)

    def trained_parameters(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return what this rank trains of each parameter of its stages: with ZeRO its shard, or else all."""
        if self.sizes.zero:
            return {shard.parameter: shard.tensor for shard in self.data.parameter_shards}
        return {parameter: parameter for parameter in self.module.parameters()}

    def own_tokens(self, full_bt: Tensor) -> Tensor:
        """Return this rank's tokens of full sequences."""
        return full_bt if self.context is None else self.context.own(full_bt)

    def in_precision(self) -> contextlib.AbstractContextManager[Any]:
        """Compute in 16 bits inside of the block, if the sizes say so; parameters stay as they are."""
        if self.sizes.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def gathered(self) -> contextlib.AbstractContextManager[Any]:
        """With ZeRO 3, gather the full parameters along the data axis for the `with` block."""
        return self.data.gathered() if self.sizes.zero == 3 else contextlib.nullcontext()

    def observed(self) -> list[tuple[nn.Module, Any]]:
        """Return the modules whose forwards Run records: in a pipeline none, as its executor records them."""
        return [(self.module, None)] if self.pipeline is None else []

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return, on all ranks, the mean over replicas of what `backward` has returned on each rank.

        While replicas train alone, it is that of this rank's replica. All tensor ranks have the same loss.
        """
        mean = loss.clone()
        all_reduce(mean, "sum", self.mesh.pipeline)
        if self.are_equal:
            all_reduce(mean, "mean", self.mesh.replicas)
        return mean

    def evaluation_sums(self, x: Tensor, y: Tensor, counts: Tensor) -> Sums | None:
        """Return a replica's sums on one of its ranks: the last stage's, and there the first tensor rank."""
        x, y = self.own_tokens(x), self.own_tokens(y)
        with self.in_precision():
            outputs = self.module(x) if self.pipeline is None else self.pipeline.forward_only(x)
        return None if outputs is None else self.layers.sums_of(outputs, y, counts)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict, full on every rank, with all experts. All ranks must call it."""
        with self.gathered():
            return self.stages.full_state_dict()

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what this rank holds of a full state, such as that of a plain model."""
        for shard in self.state_shards(None):
            shard.take_from(state[shard.name.partition("/")[2]])
        if self.sizes.zero in (1, 2):
            self.data.gather_parameters()

    def state_shards(self, optimizer: torch.optim.Optimizer | None) -> list[StateShard]:
        """Return what this rank holds of each full tensor of the model and of the optimizer's state.

        axis        what a rank has of the model      its shards (training/checkpoint.py)
        pipeline    the parameters of its stages      those; a tied one also on its last stage, as a copy
        tensor      an n-th along one dimension       boxes; rows that pad a vocabulary are not saved
        data and    with ZeRO, a range of elements    ranges of a box
        context     without ZeRO, all elements        boxes, equal on all replicas
        expert      some experts of each block        those
        """
        names, copies = self.stages.first_names, self.stages.later_copies()
        held: list[tuple[nn.Parameter, Tensor, int]]  # parameter, what this rank trains of it, from where on
        held = [(parameter, parameter, 0) for parameter in names]
        if self.sizes.zero:
            held = [(shard.parameter, shard.tensor, shard.start) for shard in self.data.parameter_shards]
        shards = [shard for part in self.stages.parts() for shard in buffer_shards(part)]
        for parameter, trained, start in held:
            shape, offset = self.layers.place_of(names[parameter], parameter)
            where = {"shape": shape, "offset": offset, "box": list(parameter.shape), "start": start}
            is_copy = parameter in copies
            shards += trained_shards(names[parameter], trained, optimizer, **where, is_copy=is_copy)
        return shards

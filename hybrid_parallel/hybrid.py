"""Put the techniques of the other lessons around one model: divided layers, in stages, in replicas.

      plain ─► parallelize (tensor group) ─► Pipeline (its group) ─► BucketDataParallel or ZeRO (replicas)
      model    each layer divided            stages of this rank     gradients averaged over replicas

Before, experts take the places of the MLPs (expert_axis.py). Afterwards attention meets the tokens that other
ranks have (context_axis.py).

A step runs forwards and backwards of all microbatches, and then completes the gradients, each in its group:

      pipeline    the first and the last stage add up the gradients of an embedding that they share
      data        the replicas take the mean, also those that differ along the context axis; with ZeRO each
                  rank keeps its shard of it; replicas that train alone have nothing to complete
      tensor      with sequence parallelism the ranks add up the gradients of undivided parameters (norms,
                  positions, some biases), of which each rank has one term

All three are sums, so without ZeRO their order would not matter. With ZeRO only shards are left after the
mean. Two stages have different shards of an embedding that they share, so they must add up its gradients
before. The ranks of a tensor group have the same shards of undivided parameters, and add up these afterwards.

Without a pipeline, the mean over replicas begins during the backward of the last microbatch (with ZeRO 2 and
3, of every microbatch). In a pipeline it begins after the last backward of a rank's stages, and so at
different times in different stages.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import all_reduce, chosen_pattern, use_pattern
from data_parallel.train_bucket_overlap import BucketDataParallel
from expert_parallel.full_state import full_state
from hybrid_parallel.clipping import counted_elsewhere
from hybrid_parallel.context_axis import ContextAxis
from hybrid_parallel.expert_axis import Experts, ReplicatedExperts, add_experts, experts_of, layers_of
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import refuse_sizes
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, MLP, GPTConfig, MLPConfig, loss_of
from lab.models.text import microbatches
from low_communication.train_compressed import CompressedDataParallel
from low_communication.train_local_sgd import LocalSGD
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import table_of
from tensor_parallel.parallelize import TensorParallel, parallelize
from training.clipping import clip_grad_norm_
from training.evaluation import Sums, sums_of
from training.gradients import average_gradients
from training.state_shards import StateShard, buffer_shards, trained_shards
from training.valid_targets import count_valid, valid_targets
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel, recompute_blocks

OptimizerClass = type[torch.optim.Optimizer]


class HybridParallel(nn.Module):
    """Trains a GPT or an MLP on the ranks of `mesh`, in the way that `mesh.sizes` says.

    All ranks must give a `model` of the same shape, and the ranks of a pipeline group also the same weights:
    along the other axes the first rank's weights are copied. `example` is one microbatch of the input, with
    full sequences. `experts` take the places of a GPT's MLPs. The optimizer is an `optimizer_class` with
    `options`, for the parameters that this rank trains.
    """

    def __init__(
        self,
        model: GPT | MLP,
        mesh: Mesh,
        example: Tensor,
        optimizer_class: OptimizerClass = torch.optim.AdamW,
        experts: Experts | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        config = model.config if isinstance(model, GPT) else MLPConfig(len(model.layers), model.sizes[1])
        if isinstance(config, GPTConfig):
            config = replace(config, block_size=example.shape[1])
        batch_size = len(example) * mesh.sizes.data * mesh.sizes.microbatches
        num_experts = 1 if experts is None else experts.moe.num_experts
        refuse_sizes(mesh.sizes, config, batch_size, dist.get_world_size(), num_experts)
        self.mesh, self.plain, self.sizes, sizes = mesh, model, mesh.sizes, mesh.sizes
        self.device = example.device
        for group in (mesh.pipeline, mesh.replicas, mesh.context, mesh.tensor):
            use_pattern(sizes.pattern, group)
        self.pattern = chosen_pattern("all_reduce", mesh.replicas)  # the other groups have the same
        self.experts = None if experts is None else mesh.expert_groups()
        if experts is not None:
            add_experts(model, experts, self.experts, sizes.microbatches, sizes.pattern)
        self.tensor = parallelize(model, mesh.tensor, sizes.sequence_parallel) if sizes.tensor > 1 else None
        self.loss_of: Callable[..., Tensor] = self.tensor.loss if self.tensor else loss_of
        self.pipeline: Pipeline | None = None
        self.module: nn.Module = self.tensor or model
        self.context = (
            ContextAxis(model, mesh.context, sizes, example.shape[1]) if sizes.context > 1 else None
        )
        example = self.own_tokens(example)
        self.example_shape = example.shape
        if sizes.recompute and sizes.pipeline == 1:
            recompute_blocks(model)
        if sizes.pipeline > 1:
            table = table_of(sizes.schedule, sizes.pipeline, sizes.microbatches, sizes.chunks)
            self.pipeline = self.module = Pipeline(
                model, table, self.loss_of, example, mesh.pipeline, recompute=sizes.recompute
            )
            # `plain` stays: it says what model this is, and TensorParallel and the caller refer to it, too.
            for parameter in {*model.parameters()} - {*self.pipeline.parameters()}:
                parameter.data = parameter.data.new_empty(0)  # it belongs to another rank's stage
        self.local: LocalSGD | None = None  # replicas that train alone
        self.are_equal = True  # the replicas, after the last step
        self._replicate(optimizer_class, options)
        self.terms: TensorParallel | None = self.tensor  # adds up gradients
        if self.tensor is not None and sizes.zero:
            self.tensor.held = self.trained_parameters()
        # A compressor rounds what tensor ranks have in full beside other numbers on each of them.
        self.rounded: list[nn.Parameter] = []
        if self.tensor is not None and sizes.compress and not sizes.sequence_parallel:
            self.rounded = [p for name, p in model.named_parameters() if name not in self.tensor.dims]

    def _replicate(self, optimizer_class: OptimizerClass, options: dict[str, Any]) -> None:
        """Keep the replicas equal: by averaged gradients, or by a stage of ZeRO."""
        group, zero = self.mesh.replicas, self.sizes.zero
        self.data: Any
        if zero in (1, 2):
            sharded = ZeroOptimizer if zero == 1 else ZeroGradientOptimizer
            parameters = self.module.parameters()
            self.data = self.optimizer = sharded(parameters, optimizer_class, group, **options)
            return
        if zero == 3:
            self.data = self.module = FullyShardedDataParallel(self.module, group)
        elif self.sizes.replicas > 1 and self.experts is not None:
            self.data = ReplicatedExperts(self.module, self.experts)
        elif self.sizes.compress:
            self.data = CompressedDataParallel(self.module, self.sizes.compress, group)
        elif self.sizes.sync_every > 1:
            self.local, self.data = LocalSGD(self.module, self.sizes.sync_every, group), None
        elif self.sizes.replicas > 1:
            self.data = BucketDataParallel(self.module, group)
        else:
            self.data = None
        self.optimizer = optimizer_class(self.module.parameters(), **options)

    def valid_targets(self, y: Tensor) -> float:
        """Return the mean over replicas of the number of valid targets; all ranks call it with their batch.

        Ranks along the context axis have the same batch, so only those along the data axis send something.
        """
        if self.sizes.data == 1 or self.local is not None:
            return count_valid(y) / self.sizes.context
        return valid_targets(y, self.mesh.data, self.pattern) / self.sizes.context

    def share_of(self, num_targets: float, y: Tensor) -> float:
        """Return what `valid_targets(y)` does, from the mean over all ranks; one alone counts its own."""
        return (num_targets if self.local is None else count_valid(y)) / self.sizes.context

    def observed(self) -> list[tuple[nn.Module, Any]]:
        """Return the modules whose forwards Run records: in a pipeline none, as its executor records them."""
        return [] if self.pipeline is not None else [(self.module, None)]

    def backward(self, x: Tensor, y: Tensor, num_targets: float | None = None) -> Tensor:
        """Compute the gradients of this replica's batch, complete them, and return the replica's mean loss.

        With a context axis the batch has full sequences, and the loss is that of this rank's tokens. In a
        pipeline the ranks of the last stage have the loss, and the others zero: see `mean_loss`. If targets
        are ignored (-100) and there is a data axis, give `num_targets=valid_targets(y)`; WorkbookError
        without it.
        """
        # Gradients that are complete must not be completed again.
        if any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]):
            raise WorkbookError(
                "There are gradients of an earlier backward; call optimizer.zero_grad() first."
            )
        for layer in layers_of(self.module):
            layer.forget()
        if num_targets is None:
            if self.sizes.data > 1 and count_valid(y) < y.numel():
                raise WorkbookError(
                    "Some targets are ignored (-100), and replicas may have unequal numbers of others: call "
                    "backward(x, y, hybrid.valid_targets(y))."
                )
            num_targets = count_valid(y) / self.sizes.context
        x, y = self.own_tokens(x), self.own_tokens(y)
        with self.in_precision():
            through = self._through_stages if self.pipeline else self._in_one_stage
            loss = through(x, y, num_targets)
        self.finish_gradient_sync()
        average_gradients(self.rounded, self.mesh.tensor)
        return loss

    def finish_gradient_sync(self) -> None:
        """Complete the gradients of the backwards: over stages, over replicas, over tensor ranks."""
        for axis in (self.pipeline, self.data, self.terms):
            if axis is not None:
                axis.finish_gradient_sync()

    def after_step(self, is_last: bool = False) -> None:
        """Average the parameters of replicas that train alone, if it is time or the training ends."""
        if self.local is not None:
            self.are_equal = self.local.after_step(self.optimizer, is_last)

    def own_tokens(self, full_bt: Tensor) -> Tensor:
        """Return this rank's tokens of full sequences."""
        return full_bt if self.context is None else self.context.own(full_bt)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return, on all ranks, the mean over replicas of what `backward` has returned on each rank.

        While replicas train alone, it is that of this rank's replica.
        """
        mean = loss.clone()
        for group, op in ((self.mesh.pipeline, "sum"), (self.mesh.replicas, "mean")):
            if dist.get_world_size(group) > 1 and (
                op == "sum" or self.are_equal
            ):  # all tensor ranks have the same loss
                all_reduce(mean, op, group, pattern=self.pattern)
        return mean

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Do what torch's clip_grad_norm_ does on the full model: each number counts once (clipping.py)."""
        groups = [self.mesh.pipeline, self.mesh.tensor]
        trained = self.trained_parameters()
        uncounted = counted_elsewhere(self.pipeline, self.tensor)
        if self.sizes.zero:
            groups.append(self.mesh.replicas)
        if self.experts is not None:
            groups.append(self.experts.experts)
            if self.experts.rank > 0:
                uncounted |= {*trained} - {*experts_of(self.module)}
        groups = [group for group in groups if dist.get_world_size(group) > 1]
        uncounted = {tensor for parameter, tensor in trained.items() if parameter in uncounted}
        return clip_grad_norm_(trained.values(), max_norm, groups, self.pattern, uncounted, self.device)

    def _in_one_stage(self, x: Tensor, y: Tensor, num_targets: float) -> Tensor:
        parts = microbatches(x, y, self.sizes.microbatches)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for i, (part, targets) in enumerate(parts):
            with contextlib.nullcontext() if i == len(parts) - 1 else self._no_sync():
                loss = self.loss_of(self.module(part), targets, num_targets)
                loss.backward()
            total += loss.detach()
        return total

    def _through_stages(self, x: Tensor, y: Tensor, num_targets: float) -> Tensor:
        assert self.pipeline is not None
        with self._no_sync():
            loss = self.pipeline.step(x, y, num_targets)
        return torch.zeros((), dtype=torch.float64, device=x.device) if loss is None else loss.double()

    def in_precision(self) -> contextlib.AbstractContextManager[Any]:
        """Compute in 16 bits inside of the block, if the sizes say so; parameters stay as they are."""
        if self.sizes.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def trained_parameters(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return what this rank trains of each parameter of its stages: with ZeRO its shard, or else all."""
        if self.sizes.zero:
            return {shard.parameter: shard.tensor for shard in self.data.parameter_shards}
        return {parameter: parameter for parameter in self.module.parameters()}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict, full on every rank, with all experts. All ranks must call it."""
        with self.gathered():
            state = self.pipeline.full_state_dict() if self.pipeline is not None else self.plain.state_dict()
            if self.tensor is None:
                state = {name: tensor.clone() for name, tensor in state.items()}
            else:
                state = {name: self.tensor.full_tensor(name, shard) for name, shard in state.items()}
        return state if self.experts is None else full_state(state, self.experts)

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what this rank holds of a full state, such as that of a plain model."""
        for shard in self.shards(None):
            shard.take_from(state[shard.name.partition("/")[2]])
        if self.sizes.zero in (1, 2):
            self.data.gather_parameters()

    def shards(self, optimizer: torch.optim.Optimizer | None) -> list[StateShard]:
        """Return what this rank holds of each full tensor of the model and of the optimizer's state.

        axis        what a rank has of the model      its shards (training/checkpoint.py)
        pipeline    the parameters of its stages      those; a tied one also on its last stage, as a copy
        tensor      an n-th along one dimension       boxes; rows that pad a vocabulary are not saved
        data and    with ZeRO, a range of elements    ranges of a box
        context     without ZeRO, all elements        boxes, equal on all replicas
        expert      some experts of each block        those
        """
        copies = counted_elsewhere(self.pipeline, self.tensor)
        names = {parameter: name for name, parameter in self.plain.named_parameters()}
        if self.pipeline is not None:
            names = self.pipeline.first_names
        held: list[tuple[nn.Parameter, Tensor, int]]  # parameter, what this rank trains of it, from where on
        held = [(parameter, parameter, 0) for parameter in names]
        if self.sizes.zero:
            held = [(shard.parameter, shard.tensor, shard.start) for shard in self.data.parameter_shards]
        modules = [self.plain] if self.pipeline is None else self.pipeline.stages.values()
        shards = [shard for module in modules for shard in buffer_shards(module)]
        for parameter, trained, start in held:
            name, local = names[parameter], list(parameter.shape)
            shape, offset = list(local), [0] * len(local)
            if self.tensor is not None and name in self.tensor.dims:
                dim, shape[dim] = self.tensor.dims[name]
                offset[dim] = self.mesh.coordinate("tensor") * local[dim]
            where = {"shape": shape, "offset": offset, "box": local, "start": start}
            shards += trained_shards(name, trained, optimizer, **where, is_copy=parameter in copies)
        return shards

    def evaluation_sums(self, x: Tensor, y: Tensor, counts: Tensor) -> Sums | None:
        """Return a replica's sums on one of its ranks: the last stage's, and there the first tensor rank."""
        x, y = self.own_tokens(x), self.own_tokens(y)
        with self.in_precision():
            logits = self.pipeline.forward_only(x) if self.pipeline is not None else self.module(x)
        if logits is None:
            return None
        is_first = self.mesh.coordinate("tensor") == 0
        if self.tensor is None or isinstance(self.plain, MLP):  # each tensor rank has all outputs of an MLP
            return sums_of(logits, y, counts) if is_first else None
        loss = self.tensor.loss(logits, y, num_targets=1).double()  # the sum
        return torch.stack([loss, torch.zeros_like(loss)]) if is_first else None

    def gathered(self) -> contextlib.AbstractContextManager[Any]:
        """With ZeRO 3, gather the full parameters along the data axis for the `with` block."""
        return self.data.gathered() if self.sizes.zero == 3 else contextlib.nullcontext()

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Add gradients up in the block: nothing is sent, or with ZeRO 2 those of each microbatch."""
        if self.data is not None:
            self.data.require_backward_grad_sync = False
        if self.sizes.zero == 2:
            self.data.require_backward_grad_sync = True
        yield
        if self.data is not None:
            self.data.require_backward_grad_sync = True
        if self.sizes.zero == 2:
            self.data.finish_gradient_sync()

    def named_own_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by all names that they have in the full model.

        A tied parameter has both names, or in a pipeline only that of this rank's copy.
        """
        if self.pipeline is not None:
            return self.pipeline.named_own_parameters()
        return dict(self.plain.named_parameters(remove_duplicate=False))

"""Train with PyTorch's own parallelize_module in the same loop: parameters are DTensors.

      what ours does (parallelize.py)              what PyTorch does
      layers of other classes replace the plain    classes stay; a plan says by module name how weights are
                                                   placed, and hooks convert inputs and outputs
      a parameter is this rank's shard             a DTensor: a local tensor and a placement, Shard(dim),
                                                   Replicate or Partial (one term of a sum)
      a collective, its conjugate in the backward  redistribute() from one placement to another, and back
      one all-reduce for q, k and v, because they  PrepareModuleInput makes one DTensor of their input; with
      share one function                           ColwiseParallel alone each gradient would be reduced
      the input's gradient is reduced while the    the reduction is waited for at once
      weight's is computed
      tokens are gathered again in the backward    gathered tokens are kept: fewer bytes, more memory
      finish_gradient_sync() adds up gradients of  these gradients stay Partial, and are all-reduced each time
      norms and positions, all at once             they are read: by AdamW three times; see below
      the embedding's gradient has this rank's     it has all entries, on every rank, and is sharded then
      vocabulary entries
      the vocabulary is padded                     the last rank has fewer entries, padded only to be sent
      vocab_parallel_cross_entropy                 loss_parallel() around F.cross_entropy and its backward
      sequence parallelism pads the tokens         hooks assume equal shards: other lengths are refused
      clip_grad_norm_, and random numbers of each  only if all parameters and activations are DTensors; here
      rank's own                                   norms, and the inputs of dropout, are plain tensors

Ours does not have: meshes of several axes (lesson 5), plans for any model, and asynchronous tensor
parallelism in compiled models.

The collectives of DTensors are operators (`_c10d_functional`), and an operator can have another kernel.
`by_comm` installs kernels that call comm with pattern "torch". So the collectives are counted, drawn in
traces, and slowed down by --link as ours are, while gloo or nccl still does the work.

https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from comm import cost
from comm.collectives import Group, Work, all_gather, all_reduce, broadcast, reduce_scatter
from comm.script import start
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, loss_of
from lab.trace.ledger import Traffic
from lab.trace.timeline import span
from tensor_parallel.arguments import validate_size
from tensor_parallel.layers import TIME
from training.arguments import NotOffered, Size, TrainArgs
from training.run import Run
from training.validate import validate_nccl


class PositionsOfOwnTokens(ParallelStyle):
    """The style of an embedding that looks up this rank's shard of its input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(_: nn.Module, inputs: tuple[Tensor]) -> DTensor:
            positions = DTensor.from_local(inputs[0], device_mesh, [Replicate()])
            return positions.redistribute(placements=[Shard(0)])

        module.register_forward_pre_hook(shard)
        module.register_forward_hook(lambda _, __, found: found.to_local())
        return distribute_module(module, device_mesh)  # every rank has the full weight


def plan_of(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Return how each module of a GPT is parallelized, by name."""
    between = (
        Shard(TIME) if sequence_parallel else Replicate()
    )  # the placement of activations between blocks and between their halves
    attention: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    attention |= {"o_proj": RowwiseParallel(output_layouts=between)}
    block = {
        "attention": PrepareModuleInput(
            input_layouts=between, desired_input_layouts=Replicate(), use_local_output=False
        ),
        **{f"attention.{name}": style for name, style in attention.items()},
        "mlp.up_proj": ColwiseParallel(input_layouts=between),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    plan: dict[str, ParallelStyle] = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        **{f"blocks.*.{name}": style for name, style in block.items()},
        "head": ColwiseParallel(input_layouts=between, use_local_output=False),  # as loss_parallel wants it
    }
    if sequence_parallel:
        norms = ("blocks.*.attention_norm", "blocks.*.mlp_norm", "final_norm")
        plan |= {name: SequenceParallel(use_local_output=True) for name in norms}
        plan["position_embedding"] = PositionsOfOwnTokens()
    return plan


def shard(model: GPT, device: torch.device, sequence_parallel: bool = False) -> GPT:
    """Broadcast the model from rank 0, and let PyTorch divide it among the ranks in place.

    The model returns its logits as a DTensor. Raises WorkbookError unless the number of ranks divides the
    heads.
    """
    config, ranks = model.config, dist.get_world_size()
    for what, heads in (("query heads", config.num_heads), ("key and value heads", config.kv_heads)):
        if heads % ranks:
            raise WorkbookError(f"{heads} {what} cannot be divided among {ranks} ranks equally.")
    for parameter in model.parameters():
        broadcast(parameter.detach(), root=0)
    mesh = init_device_mesh(device.type, (ranks,))
    is_tied = model.head.weight is model.token_embedding.weight
    # By default (src_data_rank=0) each parameter would be scattered from rank 0 once more.
    parallelize_module(model, mesh, plan_of(sequence_parallel), src_data_rank=None)
    if is_tied:
        model.head.weight = model.token_embedding.weight  # each was sharded on its own
    if sequence_parallel:
        model.register_forward_pre_hook(validate_equal_shards)
    return model


def validate_equal_shards(model: nn.Module, inputs: tuple[Tensor]) -> None:
    """Raise WorkbookError, as a hook before the forward, unless the number of ranks divides the tokens."""
    time, ranks = inputs[0].shape[TIME], dist.get_world_size()
    if time % ranks:
        raise WorkbookError(
            f"{time} tokens cannot be divided among {ranks} ranks equally, as DTensor's sequence parallel "
            "needs them; run_mode sequence_parallel pads them."
        )


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the plain model, full on every rank; all ranks must call it."""
    state = model.state_dict()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


@contextmanager
def by_comm() -> Iterator[None]:
    """Make the collectives of DTensors call comm, with pattern "torch", inside the block."""
    in_flight: dict[int, Work] = {}

    def of(name: Any) -> Group:
        return _resolve_process_group(GroupName(name)) if isinstance(name, str) else name

    def send(result: Tensor, work: Work) -> Tensor:
        in_flight[result.untyped_storage()._cdata] = work
        return result

    def reduced(x: Tensor, op: str, group: Any) -> Tensor:
        result = x.detach().contiguous().clone()
        return send(result, all_reduce(result, _NAMES[op.lower()], of(group), True, "torch"))

    def gathered(x: Tensor, ranks: int, group: Any) -> Tensor:
        x = x.detach().contiguous()
        result = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        return send(result, all_gather(result, x, of(group), True, "torch"))

    def scattered(x: Tensor, op: str, ranks: int, group: Any) -> Tensor:
        x = x.detach().contiguous()
        result = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
        return send(result, reduce_scatter(result, x, _NAMES[op.lower()], of(group), True, "torch"))

    def waited(x: Tensor) -> Tensor:
        work = in_flight.pop(x.untyped_storage()._cdata, None)
        if work is not None:
            work.wait()
        return x

    kernels = {
        "all_reduce": reduced,
        "all_gather_into_tensor": gathered,
        "reduce_scatter_tensor": scattered,
        "wait_tensor": waited,
    }
    # A kernel for one device is preferred to torch's own, which are for all devices.
    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        for name, kernel in kernels.items():
            for device in ("CPU", "CUDA"):
                library.impl(name, kernel, device)
        yield


_NAMES = {"sum": "sum", "avg": "mean", "max": "max", "min": "min", "product": "product"}


def finish_gradient_sync(model: nn.Module) -> None:
    """Reduce gradients that are still terms of a sum; AdamW would do it each time it reads one."""
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor) and parameter.grad.placements[0].is_partial():
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()])


def traffic_per_step(cluster: Cluster, model: GPT, batch_size: int, sequence_parallel: bool) -> Traffic:
    """Return the expected traffic: activations around each half of a block, the loss, partial gradients."""
    config = model.config
    tokens = batch_size * config.block_size

    def one(op: str, numel: int) -> Traffic:
        return cost.per_rank(op, "torch", numel, 4, cluster.world_size, cluster.rank)

    ops = ("reduce_scatter", "all_gather") if sequence_parallel else ("all_reduce",)
    ends = 2 * (2 * config.num_layers + 1)  # forward and backward; embedding and head make one pair more
    total = sum([one(op, tokens * config.width) for op in ops] * ends, Traffic())
    total += sum([one("all_reduce", tokens)] * 3, Traffic())
    if sequence_parallel:
        replicated = [name for name, _ in model.named_parameters() if "norm" in name or "position" in name]
        total += sum((one("all_reduce", model.get_parameter(name).numel()) for name in replicated), Traffic())
    return total


class DTensorRun(Run):
    """One rank's side of a run whose model returns DTensors."""

    def outputs(self, model: nn.Module, x: Tensor) -> Tensor | None:
        """Return the full logits, on rank 0."""
        logits: Any = model(x)
        full = logits.full_tensor()
        return full if self._cluster.is_main else None


@dataclasses.dataclass
class Args(TrainArgs):
    """Train by PyTorch's parallelize_module, on text: tensor parallel, or sequence parallel too."""

    size: Size = "24heads"
    """Size of the GPT (lab/models/model.py). The number of ranks must divide its number of heads: tiny and
    small have 4, 8layers and 13m have 8, 24heads has 24."""
    sequence_parallel: bool = False
    """Also divide norms, dropout and residuals among the ranks, by tokens."""
    pattern: Literal["torch"] = "torch"
    """Algorithm of the collectives: always PyTorch's own, which DTensor uses."""
    metronome: NotOffered = None  # it runs no layer, so there is nothing to divide
    checkpoint: NotOffered = None  # not written for DTensors here; tensor_parallel takes it
    resume: NotOffered = None
    auto_resume: NotOffered = None


def main(cluster: Cluster, args: Args) -> None:
    validate_nccl(cluster, "A DTensor")
    validate_size(args.size, cluster.world_size)
    run = DTensorRun(cluster, args, "tensor_parallel_native", whole_batch=True)
    model = shard(cast(GPT, run.model()), cluster.device, args.sequence_parallel)
    optimizer = run.optimizer(model)
    # On GPUs the default updates many parameters at a time, and takes no mixture of tensors and DTensors.
    optimizer.param_groups[0]["foreach"] = False
    formula = traffic_per_step(cluster, model, args.batch_size, args.sequence_parallel)
    with by_comm(), run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                with loss_parallel():  # around the backward too
                    with span("forward", "forward"):
                        loss: Any = loss_of(model(x), y)  # a DTensor
                    with span("backward", "backward"):
                        loss.backward()
                finish_gradient_sync(model)
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.mean_loss(loss.full_tensor())
            run.expect_traffic(formula)
            run.evaluate(step, model)
            run.stop_if_asked(step)
    full = run.model()
    full.load_state_dict(full_state_dict(model))
    run.finish(full)


if __name__ == "__main__":
    start(main, Args)

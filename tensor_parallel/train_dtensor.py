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
      norms and positions, all at once             they are read, by AdamW three times; main() does it once
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

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

from comm.collectives import Group, Work, all_gather, all_reduce, broadcast, reduce_scatter
from comm.cost import expected_traffic
from comm.script import start
from lab.cluster import Cluster
from lab.models.model import GPT, loss_of
from lab.trace.ledger import Traffic
from tensor_parallel.layers import TIME, validate_divisible, validate_heads
from training.arguments import NotOffered, Size, TrainArgs
from training.evaluation import sums_of
from training.run import Run
from training.validate import validate_nccl


class OwnPositions(ParallelStyle):
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
        plan["position_embedding"] = OwnPositions()
    return plan


class DTensorGPT(nn.Module):
    """A GPT that PyTorch has divided among the ranks, in place; it returns its logits as a DTensor.

    The weights become rank 0's. Raises WorkbookError unless the number of ranks divides the heads and, for
    sequence parallelism, the tokens.
    """

    def __init__(self, module: GPT, device: torch.device, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.module, self.sequence_parallel = module, sequence_parallel
        validate_heads(module.config, None)
        for parameter in module.parameters():
            broadcast(parameter.detach(), root=0)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        is_tied = module.head.weight is module.token_embedding.weight
        # By default (src_data_rank=0) each parameter would be scattered from rank 0 once more.
        parallelize_module(module, mesh, plan_of(sequence_parallel), src_data_rank=None)
        if is_tied:
            module.head.weight = module.token_embedding.weight  # each was sharded on its own

    def forward(self, x_bt: Tensor) -> Any:
        if self.sequence_parallel:
            cure = ", as DTensor's sequence parallel needs them; run_mode sequence_parallel pads them"
            validate_divisible("tokens", x_bt.shape[TIME], None, cure)
        return self.module(x_bt)

    def finish_gradient_sync(self) -> None:
        """Reduce gradients that are still terms of a sum; AdamW would do it each time it reads one."""
        for parameter in self.parameters():
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements[0].is_partial():
                parameter.grad = parameter.grad.redistribute(placements=[Replicate()])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the plain model, full on every rank; all ranks must call it."""
        state = self.module.state_dict()
        return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}

    def evaluation_sums(self, x: Tensor, y: Tensor, counts: Tensor) -> Tensor | None:
        """Return the sums over a held-out batch, from the full logits, on rank 0."""
        full = self(x).full_tensor()
        return sums_of(full, y, counts) if dist.get_rank() == 0 else None

    def traffic(self, shape: Sequence[int]) -> Traffic:
        """Return the expected traffic: activations around each half of a block, loss, partial gradients.

        `shape` is that of the batch: examples, time.
        """
        config, tokens = self.module.config, shape[0] * shape[1]
        # Forward and backward of each half of a block; embedding and head make one pair more.
        passes = 2 * (2 * config.num_layers + 1)
        around = ("reduce_scatter", "all_gather") if self.sequence_parallel else ("all_reduce",)
        ops = [(op, tokens * config.width) for op in around] * passes + [("all_reduce", tokens)] * 3
        if self.sequence_parallel:
            named = self.module.named_parameters()
            ops += [("all_reduce", p.numel()) for name, p in named if "norm" in name or "position" in name]
        return sum((expected_traffic(op, "torch", numel, 4) for op, numel in ops), Traffic())


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
    run = Run(cluster, args, "tensor_parallel_native", share=(0, 1))  # all ranks train on the whole batch
    model = DTensorGPT(run.model(), cluster.device, args.sequence_parallel)
    optimizer = run.optimizer(model)
    # What updates many parameters at a time takes no mixture of tensors and DTensors.
    optimizer.param_groups[0].update(fused=False, foreach=False)
    with by_comm():
        for x, y in run.batches(model, optimizer):
            optimizer.zero_grad()
            with loss_parallel():  # around the backward too
                loss: Any = loss_of(model(x), y, run.num_targets)  # a DTensor
                loss.backward()
            model.finish_gradient_sync()
            optimizer.step()
            run.record(loss.full_tensor())
    run.finish(model, traffic=model.traffic(x.shape))


if __name__ == "__main__":
    start(main, Args)

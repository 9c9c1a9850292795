"""Train with PyTorch's own fully_shard (FSDP2) in the same loop, on text or on images.

      what ours does (train_zero3.py)              what FSDP2 does
      a unit is one flat tensor, cut anywhere      each parameter is a DTensor, cut between rows, with padding
                                                   for each parameter whose rows n does not divide
      param is a full tensor, freed in between     param is a DTensor of a shard; during forward and backward
                                                   another parameter, a full one, takes its place
      gathers into the memory that is used         gathers a block's shards, then copies each parameter out
      prefetch on a thread, forward and backward   prefetch on CUDA streams; a CPU has none, so here each
                                                   gather and each reduce-scatter is waited for
      reduce-scatter of (n-1)/n of the bytes       gloo's is an all-reduce and a slice: twice as many bytes
      gradients are sent in each microbatch        set_requires_gradient_sync(False): full gradients add up
                                                   on each rank, and are sent once
      zeros for a parameter that a rank did        without set_reduce_scatter_unused_params(True) messages
      not use                                      do not match; with it all ranks get zeros
      root and last block stay full, because       the root stays full
      the backward begins with them
      compute_dtype                                MixedPrecisionPolicy: the dtypes of compute, reductions,
                                                   and of outputs
      a checkpoint has ranges of flat parameters   the rows of a DTensor are such a range, so each can load
                                                   the other's checkpoint

Ours does not have shards in CPU memory, and parameters that are DTensors already, as in tensor parallelism.
A mesh that shards along one axis and replicates along the other (HSDP) is low_communication/train_hsdp.py.

FSDP2 allows other implementations of its all-gather and reduce-scatter. Here they call `comm` with pattern
"torch", so they are counted, drawn, and slowed down by --link, while gloo or nccl still does the work. The
bytes that are counted, and delayed by --link, are those of the best-known algorithm. (The norm for --clip, a
few bytes, is sent by torch itself and not counted.)

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; the idea is from FSDP1: Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023, https://arxiv.org/abs/2304.11277.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # has no public name yet
from torch.distributed.tensor import DTensor

from comm.collectives import Work, all_gather, broadcast, reduce_scatter
from comm.cost import expected_traffic
from comm.script import start
from lab.cluster import Cluster
from lab.models.model import GPT, loss_of
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.memory import MemoryReport
from lab.trace.timeline import span
from training.arguments import ZeroArgs
from training.run import Run
from training.validate import validate_nccl
from zero.memory import Share, owned


@dataclasses.dataclass
class Args(ZeroArgs):
    """Train with PyTorch's fully_shard, on text (gpt) or handwritten digits (baby_cnn)."""

    model: Literal["gpt", "baby_cnn"] = "gpt"
    """Model to train: gpt on text, or baby_cnn on images of handwritten digits."""
    pattern: Literal["torch"] = "torch"
    """Algorithm of the gathers and reductions: always PyTorch's own, which FSDP2 uses."""
    bf16: bool = False
    """Compute and communicate in bfloat16 (16 bits). The shards and the optimizer's state stay float32."""
    reshard_after_forward: bool = True
    """Free a block's parameters after its forward, and gather them again for its backward."""


class CommWork(dist.Work):
    """A handle of comm with the interface that torch expects."""

    def __init__(self, handle: Work) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: Any = None) -> bool:
        self._handle.wait()
        return True


def blocked_unless(async_op: bool) -> contextlib.AbstractContextManager[None]:
    """Record a span of waiting, unless the operation is asynchronous."""
    return contextlib.nullcontext() if async_op else span("wait", "wait")


class ByComm:
    """Makes the tensors that FSDP2 asks an operation for."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class GatherByComm(ByComm, AllGather):
    """An all-gather for FSDP2 that calls comm."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with blocked_unless(async_op):
            handle = all_gather(output_tensor, input_tensor, group, async_op, "torch")
        return CommWork(handle) if async_op else None


class ReduceByComm(ByComm, ReduceScatter):
    """A reduce-scatter for FSDP2 that calls comm: a mean, or a sum where FSDP2 scales by itself."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        how = "mean" if op == dist.ReduceOp.AVG else "sum"
        with blocked_unless(async_op):
            handle = reduce_scatter(output_tensor, input_tensor, how, group, async_op, "torch")
        return CommWork(handle) if async_op else None


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one by one: a GPT's blocks, or any other model's children."""
    return list(model.blocks if isinstance(model, GPT) else model.children())


def shard(model: Any, device: torch.device, bf16: bool = False, reshard_after_forward: bool = True) -> Any:
    """Broadcast the model from rank 0, and let FSDP2 shard it in place."""
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast(tensor.detach(), root=0, pattern="torch")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.bfloat16 if bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The loss is computed from the root's output, and needs more precision than bfloat16 has.
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32 if bf16 else None)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):  # fully_shard has changed its class
            part.set_custom_all_gather(GatherByComm())
            part.set_custom_reduce_scatter(ReduceByComm())
    # After a forward without a backward the root stays gathered, and would not be gathered again.
    model.register_forward_hook(lambda root, *_: None if torch.is_grad_enabled() else root.reshard())
    model.full_state_dict = partial(full_state_dict, model)  # which Run compares among the ranks
    return model


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the plain model, on every rank; all ranks must call it."""
    state = model.state_dict().items()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state}


def traffic_per_step(cluster: Cluster, args: Args, model: nn.Module) -> Traffic:
    """Return the traffic of a step: a microbatch gathers blocks twice and the root once, one reduces."""
    ranks, itemsize = cluster.world_size, 2 if args.bf16 else 4

    def one(op: str, parameters: Sequence[Tensor]) -> Traffic:
        numel = sum(-(-p.shape[0] // ranks) * ranks * p.shape[1:].numel() for p in parameters)
        if not numel or ranks == 1:
            return Traffic()
        return expected_traffic(op, "torch", numel, itemsize)

    layers = [list(layer.parameters()) for layer in layers_of(model)]
    in_layers = {id(parameter) for layer in layers for parameter in layer}
    root = [parameter for parameter in model.parameters() if id(parameter) not in in_layers]
    total = Traffic()
    for parameters in (root, *layers):
        gathers = 1 if parameters is root or not args.reshard_after_forward else 2
        total += sum([one("all_gather", parameters)] * gathers * args.grad_acc_steps, Traffic())
        total += one("reduce_scatter", [parameter for parameter in parameters if parameter.requires_grad])
    return total


def main(cluster: Cluster, args: Args) -> None:
    validate_nccl(cluster, "FSDP2")
    run = Run(cluster, args, "fsdp")
    if cluster.device.type == "cuda":
        run.not_measured = "FSDP2 waits on CUDA streams of its own, which no span records"
    model = shard(run.model(), cluster.device, args.bf16, args.reshard_after_forward)
    optimizer = run.optimizer(model)
    mine = [(p.numel(), p.to_local().numel(), p.itemsize, p.requires_grad) for p in model.parameters()]
    shares = [Share(*numbers) for numbers in mine]  # some rows of each parameter
    memory = MemoryReport(model, optimizer, owned(3, shares, args.states))
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        total = torch.zeros((), device=cluster.device)
        parts = microbatches(x, y, args.grad_acc_steps)
        for i, (part_x, part_y) in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            loss = loss_of(model(part_x), part_y, run.num_targets)
            loss.backward()
            total += loss.detach()
        if args.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        run.record(total)
    run.finish(model, traffic=traffic_per_step(cluster, args, model), **memory.fields())


if __name__ == "__main__":
    start(main, Args)

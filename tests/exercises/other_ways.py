"""Solve each open exercise in another way than the lesson: short, and often slower.

That these pass shows that an open exercise is graded by what a solution does. Nothing here uses a lesson's
own classes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from comm.functions import copy_to_ranks, exchange_shards, gather_tokens, sum_over_ranks
from comm.point_to_point import irecv, isend
from low_communication.compressors import COMPRESSORS
from pipeline_parallel.actions import BACKWARD, FORWARD, Action


def open_all_reduce(wire, full, op):
    """Send chunk p to rank p, reduce there, and send the result to all."""
    n, r = wire.size, wire.rank
    chunks = list(full.tensor_split(n))
    others = [(r + step) % n for step in range(1, n)]
    arrived = {p: torch.empty_like(chunks[r]) for p in others}
    transfers = [wire.irecv(arrived[p], p) for p in others if chunks[r].numel()]
    transfers += [wire.isend(chunks[p], p) for p in others if chunks[p].numel()]
    for transfer in transfers:
        transfer.wait()
    if chunks[r].numel():
        all_rn = torch.stack([arrived.get(p, chunks[r]) for p in range(n)])
        reduce = {"sum": all_rn.sum, "mean": all_rn.mean, "max": all_rn.amax, "min": all_rn.amin}
        chunks[r].copy_(reduce[op](0) if op in reduce else all_rn.prod(0))
    transfers = [wire.irecv(chunks[p], p) for p in others if chunks[p].numel()]
    transfers += [wire.isend(chunks[r], p) for p in others if chunks[r].numel()]
    for transfer in transfers:
        transfer.wait()


class Replicas(nn.Module):
    def __init__(self, module, group=None):
        super().__init__()
        self.module, self.group, self.require_backward_grad_sync = module, group, True
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, group=group)

    def forward(self, *inputs):
        return self.module(*inputs)


class NaiveDataParallel(Replicas):
    def finish_gradient_sync(self):
        for parameter in self.trained:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            all_reduce(gradient, "mean", self.group)
            parameter.grad = gradient


class BucketDataParallel(Replicas):
    """Copies gradients into a new flat tensor for each message, and out of it at the end."""

    def __init__(self, module, group=None, bucket_mb=1.0):
        super().__init__(module, group)
        self.buckets = [[]]
        for parameter in reversed(self.trained):
            if sum(p.nbytes for p in self.buckets[-1]) >= bucket_mb * 2**20:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self.arrived)
        self.there, self.sent = set(), []

    def arrived(self, parameter):
        if self.require_backward_grad_sync:
            self.there.add(parameter)
            while len(self.sent) < len(self.buckets) and self.there.issuperset(self.buckets[len(self.sent)]):
                self.send()

    def send(self):
        bucket = self.buckets[len(self.sent)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([gradient.flatten() for gradient in grads] or [torch.zeros(0)])
        self.sent.append((flat, all_reduce(flat, "mean", self.group, async_op=True)))

    def finish_gradient_sync(self):
        while len(self.sent) < len(self.buckets):
            self.send()
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view(p.shape).clone()
        self.there, self.sent = set(), []


class ZeroOptimizer:
    """Has one flat tensor for all parameters, and sends when all backwards have ended."""

    def __init__(self, params, optimizer_class, group=None, **defaults):
        given = list(params)
        for p in given:
            broadcast(p.data, group=group)
        self.group, self.params = group, [p for p in given if p.requires_grad]
        n, r = dist.get_world_size(group), dist.get_rank(group)
        total = sum(p.numel() for p in self.params)
        self.flat, self.grads = (self.params[0].new_zeros(-(-total // n) * n) for _ in range(2))
        for p, place, grad in zip(self.params, self.views(self.flat), self.views(self.grads), strict=True):
            p.data, p.grad = place.copy_(p.data), grad
        self.is_reduced = False
        self.shard, self.own_grads = nn.Parameter(self.flat.chunk(n)[r]), self.grads.chunk(n)[r]
        self.inner = optimizer_class([self.shard], **defaults)

    def views(self, flat):
        parts = flat.split(
            [*(p.numel() for p in self.params), flat.numel() - sum(p.numel() for p in self.params)]
        )
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=False)]

    def zero_grad(self):
        self.grads.zero_()
        self.is_reduced = False

    def finish_gradient_sync(self):
        reduce_scatter(self.own_grads, self.grads, "mean", self.group)
        self.shard.grad, self.is_reduced = self.own_grads, True

    def step(self):
        if not self.is_reduced:
            self.finish_gradient_sync()
        self.inner.step()
        all_gather(self.flat, self.shard.data.clone(), self.group)


class ZeroGradientOptimizer(ZeroOptimizer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.grads = self.own_grads = None
        self.zero_grad()

    def zero_grad(self):
        self.is_reduced, self.shard.grad = False, None
        for p in self.params:
            p.grad = None

    def finish_gradient_sync(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        flat = torch.cat([gradient.flatten() for gradient in grads])
        flat = nn.functional.pad(flat, (0, self.flat.numel() - len(flat)))
        mine = torch.empty_like(self.shard)
        reduce_scatter(mine, flat, "mean", self.group)
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        for p in self.params:
            p.grad = None
        self.is_reduced = True


class FullyShardedDataParallel(nn.Module):
    """Gathers everything before the first forward, and frees it after the last backward."""

    def __init__(self, module, group=None):
        super().__init__()
        self.__dict__["module"] = module  # `parameters()` are the shards alone
        self.group, self.is_full, self.flats = group, False, []
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, group=group)
        self.shards = nn.ParameterList()
        n, r = dist.get_world_size(group), dist.get_rank(group)
        for is_trained in (True, False):
            params = [p for p in module.parameters() if p.requires_grad == is_trained]
            if params:
                flat = torch.cat([p.data.flatten() for p in params])
                flat = nn.functional.pad(flat, (0, -len(flat) % n))
                shard = nn.Parameter(flat.chunk(n)[r].clone(), requires_grad=is_trained)
                self.flats.append((params, [p.shape for p in params], shard, len(flat)))
                if is_trained:
                    self.shards.append(shard)
        self.free()

    def gather(self):
        for params, shapes, shard, numel in [] if self.is_full else self.flats:
            full = shard.new_empty(numel)
            all_gather(full, shard.data, self.group)
            parts = full.split([*(shape.numel() for shape in shapes), numel - sum(s.numel() for s in shapes)])
            for p, part, shape in zip(params, parts, shapes, strict=False):
                p.data = part.view(shape)
        self.is_full = True

    def free(self):
        for params, *_ in self.flats:
            for p in params:
                p.grad, p.data = None, p.data.new_empty(0)
        self.is_full = False

    def forward(self, *inputs):
        self.gather()
        return self.module(*inputs)

    def finish_gradient_sync(self):
        for params, _, shard, numel in self.flats[:1]:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            flat = torch.cat([gradient.flatten() for gradient in grads])
            flat = nn.functional.pad(flat, (0, numel - len(flat)))
            shard.grad = torch.empty_like(shard)
            reduce_scatter(shard.grad, flat, "mean", self.group)
        self.free()

    def full_state_dict(self):
        self.gather()
        state = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        self.free()
        return state


class ColumnParallelLinear(nn.Module):
    def __init__(self, plain, group=None):
        super().__init__()
        n, r, self.group = dist.get_world_size(group), dist.get_rank(group), group
        self.weight = nn.Parameter(plain.weight.data.chunk(n)[r].clone())
        self.bias = nn.Parameter(plain.bias.data.chunk(n)[r].clone())

    def forward(self, x):
        return copy_to_ranks(x, self.group) @ self.weight.T + self.bias


class RowParallelLinear(nn.Module):
    def __init__(self, plain, group=None):
        super().__init__()
        n, r, self.group = dist.get_world_size(group), dist.get_rank(group), group
        self.weight, self.bias = nn.Parameter(plain.weight.data.chunk(n, 1)[r].clone()), plain.bias

    def forward(self, x):
        return sum_over_ranks(x @ self.weight.T, self.group) + self.bias


class AllForwardAllBackward(nn.Module):
    """Learns the shapes of activations by running the example through all stages."""

    def __init__(self, stages, microbatches, loss_of, example):
        super().__init__()
        self.rank, self.last, self.loss_of = dist.get_rank(), len(stages) - 1, loss_of
        self.stage, self.microbatches, self.inputs = stages[self.rank], microbatches, [example]
        with torch.no_grad():
            for stage in stages[:-1]:
                self.inputs.append(stage(self.inputs[-1]))

    def step(self, x, y):
        kept, sends, losses = [], [], []
        for x_i, y_i in zip(x.chunk(self.microbatches), y.chunk(self.microbatches), strict=True):
            if self.rank > 0:
                x_i = torch.empty_like(self.inputs[self.rank])
                irecv(x_i, self.rank - 1).wait()
            made = self.stage(x_i.requires_grad_())
            if self.rank < self.last:
                sends.append(isend(made.detach().contiguous(), self.rank + 1))
            else:
                made = self.loss_of(made, y_i) / self.microbatches
                losses.append(made.detach())
            kept.append((x_i, made))
        for given, made in kept:
            gradient = None
            if self.rank < self.last:
                gradient = torch.empty_like(made)
                irecv(gradient, self.rank + 1).wait()
            made.backward(gradient)
            if self.rank > 0:
                sends.append(isend(given.grad, self.rank - 1))
        for transfer in sends:
            transfer.wait()
        return sum(losses) if losses else None


def one_f_one_b(stages, microbatches):
    """Let a forward follow each backward, so that a rank holds as many microbatches as it may."""
    rows = []
    for r in range(stages):
        forwards = [Action(FORWARD, microbatch, r) for microbatch in range(microbatches)]
        rows.append(forwards[: stages - r])
        for microbatch in range(microbatches):
            then = stages - r + microbatch
            rows[r] += [Action(BACKWARD, microbatch, r), *forwards[then : then + 1]]
    return rows


def ring_attention(q, k, v, sequence, dropout=0.0):
    """Gather the keys and values of all ranks, padded to the same length, and hide those that come later."""
    positions = [sequence.cut.positions(rank) for rank in range(sequence.size)]
    longest = max(map(len, positions))
    padded = nn.functional.pad(torch.stack([k, v]), (0, 0, 0, longest - k.shape[2]))
    parts = gather_tokens(padded, 3, sequence.group).chunk(sequence.size, 3)
    k, v = torch.cat([part[:, :, :, : len(own)] for part, own in zip(parts, positions, strict=True)], 3)
    hidden = torch.cat(positions) > positions[sequence.rank][:, None]
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def moe_forward(self, x_btd):
    """Handle one choice of all tokens after the other, with an exchange for each of this rank's experts."""
    x, group = x_btd.flatten(0, -2), self.groups.experts
    n = dist.get_world_size(group)
    _, weights, experts = self.router(x.requires_grad_() if x.is_leaf else x)
    y = torch.zeros_like(x)
    for choice in range(experts.shape[1]):
        for place, name in enumerate(self.experts):  # on each rank its expert number `place`
            mine = [place + p * len(self.experts) for p in range(n)]
            rows = [(experts[:, choice] == expert).nonzero().flatten() for expert in mine]
            sent = torch.tensor([len(each) for each in rows])
            received = torch.empty_like(sent)
            all_to_all(received, sent, group=group)
            order = torch.cat(rows)
            there = exchange_shards(x[order], 0, group, sent.tolist(), received.tolist())
            back = exchange_shards(self.experts[name](there), 0, group, received.tolist(), sent.tolist())
            y = y.index_add(0, order, back * weights[order, choice].unsqueeze(1))
    return y.view_as(x_btd)


class CompressedDataParallel(Replicas):
    """Compresses each parameter alone, after the backward."""

    def __init__(self, module, compress="int8", group=None, **options):
        super().__init__(module, group)
        self.compressors = [COMPRESSORS[compress]([p.shape], group, **options) for p in self.trained]
        self.left = [torch.zeros_like(p) for p in self.trained]

    def finish_gradient_sync(self):
        for p, compressor, left in zip(self.trained, self.compressors, self.left, strict=True):
            if p.grad is not None:
                left += p.grad
            flat = left.flatten().clone()
            left -= compressor.mean(flat).view_as(p)
            p.grad = flat.view_as(p)


SOLUTIONS: dict[str, tuple[Any, ...]] = {
    "open_all_reduce": (open_all_reduce,),
    "open_naive": (NaiveDataParallel,),
    "open_buckets": (BucketDataParallel,),
    "zero1": (ZeroOptimizer,),
    "zero2": (ZeroGradientOptimizer,),
    "zero3": (FullyShardedDataParallel,),
    "open_tensor_parallel": (ColumnParallelLinear, RowParallelLinear),
    "gpipe_by_hand": (AllForwardAllBackward,),
    "open_1f1b": (one_f_one_b,),
    "open_ring_attention": (ring_attention,),
    "open_moe": (moe_forward,),
    "error_feedback": (CompressedDataParallel,),
}

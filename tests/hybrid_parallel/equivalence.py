"""Compare a GPT or an MLP on a mesh with one process: each gradient and each parameter, in each step."""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import all_reduce
from comm.functions import InFlightAllGather
from expert_parallel.config import MoEConfig
from expert_parallel.full_state import full_state
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.report import counted_by_axis
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.traffic import traffic_of_axes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import GPT, IGNORED, MLP, GPTConfig, loss_of
from lab.trace.ledger import LEDGER, Entry, Traffic
from tests.expert_parallel.reference import NaiveMixture
from training.valid_targets import count_valid, valid_targets

RTOL, LEARNING_RATE, CLIP, STEPS = 1e-9, 0.3, 0.5, 2
VOCABULARY, TIME = 13, 12

Tensors = dict[str, Tensor | None]


def gpt(seed: int = 0, ignored: int = 0, **changes: Any) -> GPT:
    sizes = {"vocab_size": VOCABULARY, "block_size": TIME, "num_layers": 4, "num_heads": 4, "width": 8}
    return GPT(GPTConfig(**{**sizes, **changes}), seed=seed).double()


def built(seed: int = 0, mlp: tuple[int, ...] = (), **changes: Any) -> GPT | MLP:
    """Return a GPT, or the MLP of these sizes."""
    return MLP(mlp, seed).double() if mlp else gpt(seed, **changes)


def batch(rows: int, mlp: tuple[int, ...] = (), ignored: int = 0, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the input and the targets of a step for the model that `built` returns.

    In the first half of the rows the first `ignored` targets do not count.
    """
    generator = torch.Generator().manual_seed(2)
    if mlp:
        x = torch.randn(rows, mlp[0], dtype=torch.float64, generator=generator)
        return x, torch.randint(mlp[-1], (rows,), generator=generator)
    tokens = torch.randint(VOCABULARY, (rows, TIME + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[: rows // 2, :ignored] = IGNORED
    return tokens[:, :-1], targets


class Step(NamedTuple):
    """Holds a step of one process: gradients before they are clipped, and parameters after the update."""

    loss: Tensor
    gradients: Tensors
    norm: Tensor
    parameters: Tensors


@cache
def of_one_process(rows: int, changes: tuple[tuple[str, Any], ...]) -> list[Step]:
    """Return each step of SGD with clipped gradients; a tied parameter has both of its names."""
    return list(steps_of(built(**dict(changes)), [batch(rows, **dict(changes))]))


def with_experts(
    hybrid: HybridParallel, experts: Experts, rows: int, changes: dict[str, Any]
) -> Iterator[Step]:
    """Return the steps of one process that computes all experts for all tokens.

    A microbatch of it has the examples of that microbatch in all replicas. The dense weights are those of
    seed 0, and the experts' those with which the ranks begin.
    """
    sizes, initial = hybrid.sizes, hybrid.full_state_dict()
    model = with_plain_experts(gpt(**changes), experts.moe, sizes.replicas)
    dense = {name: tensor for name, tensor in gpt(**changes).state_dict().items() if "mlp." not in name}
    assert_same({name: initial[name] for name in dense}, dense, 0, "initial parameter")
    model.load_state_dict(initial)
    x, y = (part.unflatten(0, (sizes.data, sizes.microbatches, -1)) for part in batch(rows, **changes))
    parts = [(x[:, i].flatten(0, 1), y[:, i].flatten(0, 1)) for i in range(sizes.microbatches)]
    return steps_of(model, parts, experts.aux_weight)


def steps_of(model: GPT | MLP, parts: list[tuple[Tensor, Tensor]], aux_weight: float = 0.0) -> Iterator[Step]:
    """Yield each step of SGD with clipped gradients on microbatches; a tied parameter has both names."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, num_targets = torch.zeros((), dtype=torch.float64), sum(count_valid(y) for _, y in parts)
        for x, y in parts:
            loss = loss_of(model(x), y, num_targets)
            total += loss.detach()
            (loss + aux_weight * auxiliary_loss(model) / len(parts)).backward()
        named = dict(model.named_parameters(remove_duplicate=False))
        gradients: Tensors = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        trained: Tensors = {name: p.detach().clone() for name, p in named.items()}
        yield Step(total, gradients, norm, trained)


def with_all_experts(hybrid: HybridParallel, own: Tensors) -> Tensors:
    """Return tensors by name, with those of the experts of all ranks."""
    return own if hybrid.mesh.experts is None else full_state(own, hybrid.mesh.experts)


def those_of(hybrid: HybridParallel, every: Tensors) -> Tensors:
    """Return the tensors of the parameters that this rank's stages have, with all experts."""

    def any_expert(names: Iterable[str]) -> set[str]:
        return {re.sub(r"experts\.\d+", "experts", name) for name in names}

    own = any_expert(hybrid.stages.named_own_parameters())
    return {name: tensor for name, tensor in every.items() if any_expert([name]) <= own}


def full(hybrid: HybridParallel, name: str, tensor: Tensor) -> Tensor:
    """Return the full tensor from the shards of the tensor axis."""
    if name not in hybrid.layers.dims:
        return tensor
    dim, size = hybrid.layers.dims[name]
    plain = tensor.as_subclass(Tensor)
    return InFlightAllGather(plain.clone(), dim, hybrid.mesh.tensor).wait().narrow(dim, 0, size)


def gradients_of(hybrid: HybridParallel) -> Tensors:
    """Return the full gradients; ZeRO's shards of them are put together from the data axis."""
    named, zero = hybrid.stages.named_own_parameters(), hybrid.sizes.zero
    local = {} if zero else {parameter: parameter.grad for parameter in named.values()}
    if zero:
        shards = hybrid.data.parameter_shards
        flat = torch.zeros(sum(shard.parameter.numel() for shard in shards), dtype=torch.float64)
        parts = flat.split([shard.parameter.numel() for shard in shards])
        for shard, part in zip(shards, parts, strict=True):
            part[shard.start : shard.start + shard.tensor.numel()] = shard.tensor.grad.flatten()
            local[shard.parameter] = part.view(shard.parameter.shape)
        all_reduce(flat, group=hybrid.mesh.replicas)
    own: Tensors = {n: full(hybrid, n, local[p]) for n, p in named.items() if local[p] is not None}
    return with_all_experts(hybrid, own)


@contextmanager
def counting(sent: dict[Entry, Traffic]) -> Iterator[None]:
    """Add what this rank sends inside of the block."""
    before = LEDGER.rows()
    yield
    for entry, traffic in LEDGER.rows().items():
        sent[entry] = sent.get(entry, Traffic()) + traffic - before.get(entry, Traffic())


def described(sizes: ParallelSizes) -> str:
    """Return the sizes in words, with what the ranks of each axis do."""
    tokens = ", sequence parallel" if sizes.sequence_parallel else ""
    schedule = f", {sizes.schedule}" if sizes.pipeline > 1 else ""
    cut = f", {sizes.attention}" if sizes.context > 1 else ""
    experts = f", experts on {sizes.expert_ranks}" if sizes.expert_ranks > 1 else ""
    return f"{sizes}, zero {sizes.zero}{tokens}{schedule}{cut}{experts}"


def compare(cluster: Cluster, sizes: ParallelSizes, experts: Experts | None = None, **changes: Any) -> None:
    """Train as `sizes` says, and compare with one process; compare what is sent with the formulas.

    Each replica begins with other weights. A GPT has two layers, or one for each stage.
    """
    if "mlp" not in changes:
        changes = {"num_layers": max(2, sizes.num_stages)} | changes
    mesh = Mesh(cluster, sizes)
    replica, what = mesh.coordinate("data"), f"{described(sizes)}, {experts}"
    rows = 2 * sizes.data * sizes.microbatches
    x, y = (part.chunk(sizes.data)[replica] for part in batch(rows, **changes))
    example = x[: len(x) // sizes.microbatches]
    model = built(seed=dist.get_rank(mesh.replicas), **changes)
    hybrid = put_on_mesh(model, mesh, example, torch.optim.SGD, experts, lr=LEARNING_RATE)
    one_process: Iterable[Step] = (
        of_one_process(rows, tuple(changes.items()))
        if experts is None
        else with_experts(hybrid, experts, rows, changes)
    )
    for number, step in enumerate(one_process):
        sent: dict[Entry, Traffic] = {}
        num_targets = valid_targets(y, mesh.data) if "ignored" in changes else None
        with counting(sent):
            hybrid.optimizer.zero_grad()
            own_loss = hybrid.backward(x, y, num_targets)
        loss = hybrid.mean_loss(own_loss)
        assert_same({"loss": loss}, {"loss": step.loss}, RTOL, f"loss of step {number}, {what},")
        ours = gradients_of(hybrid)
        assert_same(ours, those_of(hybrid, step.gradients), RTOL, f"gradient of step {number}, {what},")
        with counting(sent):
            norm = hybrid.clip_grad_norm_(CLIP)
        assert_same(
            {"norm": norm}, {"norm": step.norm}, RTOL, f"norm of all gradients in step {number}, {what},"
        )
        with counting(sent):
            hybrid.optimizer.step()
        counted, by_formula = counted_by_axis(sent), traffic_of_axes(hybrid, True)
        assert counted == by_formula, f"step {number}, {what}: sends {counted}, by the formulas {by_formula}"
        if number < STEPS - 1:
            continue
        with hybrid.gathered():
            own = {
                n: full(hybrid, n, p.detach()).clone()
                for n, p in hybrid.stages.named_own_parameters().items()
            }
        ours, expected = with_all_experts(hybrid, own), those_of(hybrid, step.parameters)
        done = f"parameter after step {number} (its gradients and norm were right), {what},"
        assert_same(ours, expected, RTOL, done)


class PlainMixture(NaiveMixture):
    """A NaiveMixture that computes all tokens at once."""

    def forward(self, x_btd: Tensor) -> Tensor:
        rows, moe = x_btd.flatten(0, 1), self.moe
        self.probabilities = (rows @ self.router.weight.T).softmax(-1)
        chosen_tE = torch.zeros_like(self.probabilities).scatter(
            1, (self.probabilities.detach() + self.router.bias_E).topk(moe.top_k).indices, 1.0
        )
        self.counts = chosen_tE.sum(0).int().tolist()
        if moe.capacity is not None:
            of_each_rank = chosen_tE.unflatten(0, (self.num_ranks, -1))
            limit = math.ceil(moe.capacity * of_each_rank.shape[1] * moe.top_k / moe.num_experts)
            fits = (of_each_rank.cumsum(1) <= limit).flatten(0, 1)
            self.dropped += int((chosen_tE * ~fits).sum())
            chosen_tE = chosen_tE * fits
        weights_tE = chosen_tE * self.probabilities
        outputs = (weights_tE[:, e, None] * self.experts[str(e)](rows) for e in range(moe.num_experts))
        return sum(outputs, torch.zeros_like(rows)).view_as(x_btd)


def with_plain_experts(model: GPT, moe: MoEConfig, num_ranks: int) -> GPT:
    """Return the model with a PlainMixture in each block, whose weights are not set."""
    for block in model.blocks:
        block.mlp = PlainMixture(model.config, moe, num_ranks).to(model.head.weight)
    return model


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the sum over blocks of the auxiliary losses of the last forward; 0 without experts."""
    layers = (module for module in model.modules() if isinstance(module, PlainMixture))
    return sum((layer.auxiliary_loss() for layer in layers), torch.zeros(()))

"""A configuration is refused when it is read, or its first step has loss and gradients of one process.

What the ranks send along each axis is then what the formulas say.

The test tries 25 configurations, always the same. To try others, as many as you like:

    CONFIGURATIONS=300 .venv/bin/python -m pytest tests/hybrid_parallel/test_any_config.py
"""

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from expert_parallel.config import MoEConfig
from hybrid_parallel.arguments import HybridArgs, model_of, moe_of
from hybrid_parallel.config import load
from hybrid_parallel.planner import search as planner
from hybrid_parallel.planner.auto import planned_shape
from hybrid_parallel.planner.machine import machine_of
from hybrid_parallel.report import counted_by_axis
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.traffic import traffic_of_axes
from hybrid_parallel.train_hybrid import begin
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, MLP, GPTConfig, MLPConfig, loss_of
from lab.ranks import run_ranks
from lab.trace.ledger import Entry, Traffic
from tests.hybrid_parallel.equivalence import counting
from tests.hybrid_parallel.plain_experts import auxiliary_loss, with_plain_experts
from training.data import TrainingData

WANTED = os.environ.get("CONFIGURATIONS")
VALUES: dict[str, list[Any]] = {
    "model": ["tiny", "mlp"],
    "num_gpus": [1, 2, 3, 4, 4, 4],
    "layers": [4, 1, 2, 3, 5, 6],
    "batch_size": [4, 1, 2, 6],
    "pipeline_parallelism": [True, False, 1, 2, 3, 4],
    "zero_redundancy": [True, False, 1, 2, 3],
    "sharding_strategy": ["manual", "auto"],
    "communication_pattern": ["ring", "tree", "auto", "torch"],
    "data": [1, 2, 3, 4],
    "context": [2, 1, 3, 4],
    "attention": ["all_to_all", "ring"],
    "experts": [4, 1, 2, 3],
    "top_k": [1, 2, 3],
    "expert_ranks": [2, 1, 3, 4],
    "tensor": [2, 1, 3, 4],
    "sequence_parallel": [True, False],
    "schedule": ["1f1b", "gpipe", "naive", "interleaved", "zb_h1", "zb_v"],
    "chunks": [2, 1, 3],
    "microbatches": [2, 1, 3, 4],
    "recompute": [True, False],
    "precision": ["float32", "bf16"],
}


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Draw axes whose product is the number of processes, some other keys, and at times one more value."""
    number = draw(st.sampled_from(VALUES["num_gpus"]))
    tensor = draw(st.sampled_from([n for n in (1, 2, 4) if number % n == 0]))
    pipeline = draw(st.sampled_from([n for n in (1, 2, 3, 4) if number // tensor % n == 0]))
    entries = {"num_gpus": number, "pipeline_parallelism": pipeline, "tensor": tensor}
    replicas = number // tensor // pipeline
    if draw(st.booleans()):
        entries["context"] = draw(st.sampled_from([n for n in (1, 2, 4) if replicas % n == 0]))
    if draw(st.booleans()):
        entries["experts"] = 4
        entries["expert_ranks"] = draw(st.sampled_from([n for n in (1, 2, 4) if replicas % n == 0]))
    others = [key for key in VALUES if key not in entries and key != "data"]
    for key in draw(st.lists(st.sampled_from(others), unique=True, min_size=3, max_size=8)):
        entries[key] = draw(st.sampled_from(VALUES[key]))
    if draw(st.integers(0, 3)) == 3:
        key = draw(st.sampled_from(list(VALUES)))
        entries[key] = draw(st.sampled_from(VALUES[key]))
    return {"model": "tiny", "batch_size": 4, "layers": 4} | entries


def choose(args: HybridArgs, num_processes: int, given: dict[str, Any]) -> ParallelSizes:
    """Return the planner's choice for a machine whose speed need not be measured."""
    shape, machine = planned_shape(args), machine_of("h100")
    found = planner.plans(shape, machine, num_processes, args.batch_size, args.precision, given)
    return planner.choose(found, machine.device.memory_bytes).sizes


class FirstStep(NamedTuple):
    loss: float
    norm: float
    initial: dict[str, Tensor] | None  # the weights of a model with experts, from rank 0
    sizes: ParallelSizes


def first_step(cluster: Cluster, args: HybridArgs) -> FirstStep:
    """Return the loss of the first batch and the norm of its gradients, and make an optimizer step.

    Refuse a rank that sends other bytes along an axis than the formulas say.
    """
    run, hybrid = begin(cluster, args, "hybrid")
    initial = hybrid.full_state_dict() if args.experts > 1 else None
    sent: dict[Entry, Traffic] = {}
    with counting(sent):
        loss = hybrid.mean_loss(hybrid.backward(*run.batch(0)))
        norm = hybrid.clip_grad_norm_(1.0)
        hybrid.optimizer.step()
    counted = counted_by_axis({entry: traffic for entry, traffic in sent.items() if traffic.messages_sent})
    by_formula = traffic_of_axes(hybrid, is_clipped=True)
    assert counted == by_formula, f"sends {counted}, by the formulas {by_formula}"
    hybrid.full_state_dict()
    return FirstStep(float(loss), float(norm), initial if cluster.is_main else None, hybrid.sizes)


@cache
def of_one_process(shape: GPTConfig | MLPConfig, batch_size: int, bf16: bool) -> tuple[float, float]:
    """Return the loss and the norm of the gradients of the plain model."""
    model = MLP(shape.sizes) if isinstance(shape, MLPConfig) else GPT(shape)
    return loss_and_norm(model, [batch(shape, batch_size)], bf16)


def with_experts(args: HybridArgs, moe: MoEConfig, first: FirstStep) -> tuple[float, float]:
    """Return the same for the model with experts; a microbatch of it has the examples of all replicas."""
    shape, sizes = model_of(args), first.sizes
    model = with_plain_experts(GPT(shape), moe, sizes.replicas)
    model.load_state_dict(first.initial)
    x, y = (part.unflatten(0, (sizes.data, sizes.microbatches, -1)) for part in batch(shape, args.batch_size))
    parts = [(x[:, i].flatten(0, 1), y[:, i].flatten(0, 1)) for i in range(sizes.microbatches)]
    return loss_and_norm(model, parts, args.precision == "bf16", args.aux_weight)


def batch(shape: GPTConfig | MLPConfig, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the first global batch of a run."""
    model, length = ("mlp", 0) if isinstance(shape, MLPConfig) else ("gpt", shape.block_size)
    return TrainingData(model, batch_size, 0, length).batch(0)


def loss_and_norm(
    model: GPT | MLP, parts: list[tuple[Tensor, Tensor]], bf16: bool, aux_weight: float = 0.0
) -> tuple[float, float]:
    """Return the mean loss of microbatches and the norm of their gradients."""
    total = 0.0
    for x, y in parts:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(model(x), y)
        total += loss.item() / len(parts)
        ((loss + aux_weight * auxiliary_loss(model)) / len(parts)).backward()
    return total, float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))


@settings(
    max_examples=int(WANTED or 25),
    derandomize=WANTED is None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(configurations())
def test_a_configuration_is_refused_when_it_is_read_or_trains_like_one_process(tmp_path_factory, entries):
    path: Path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in entries.items()) + "json: True\n")
    try:
        config = load(str(path), choose=choose)
    except WorkbookError as error:
        event("refused")
        assert "\n" not in str(error) and str(error).startswith(f"{path}, line ")
        return
    event("trained")
    note(f"{config.args}")
    bf16, moe = config.args.precision == "bf16", moe_of(config.args)
    of_ranks = run_ranks(first_step, config.num_processes, config.args)
    if moe is None:
        expected = of_one_process(model_of(config.args), config.args.batch_size, bf16)
    else:
        expected = with_experts(config.args, moe, of_ranks[0])
    for got in of_ranks:
        assert (got.loss, got.norm) == pytest.approx(expected, rel=0.05 if bf16 else 1e-4)

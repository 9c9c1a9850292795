"""Predict the bytes that a rank holds at the peak of a training step.

    parameters, gradients, optimizer state   with float32 and with autocast 4, 4 and 8 bytes for each one,
                                             otherwise 2, 2 and 12, for AdamW; zero/memory.py divides them
    activations of a microbatch in a layer   what the backward needs, see `layer_activations`
    microbatches held at a time              by the schedule's formula (pipeline_parallel/analysis/theory.py)
    final norm and logits                    on the last stage; logits also in float32
    messages in flight                       between stages of a pipeline
    waiting weight gradients                 with zero-bubble schedules: their layers' inputs and gradients
    gathered units                           with ZeRO 3: two layers' parameters, and one's gradients

After Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, section 3.1, and Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022, arXiv:2205.05198, section 4.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from hybrid_parallel.planner.shapes import AnyShape, MLPShape
from hybrid_parallel.sizes import ParallelSizes
from pipeline_parallel.actions import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from pipeline_parallel.analysis import theory
from pipeline_parallel.schedules import table_of
from zero.memory import Held, formula

MESSAGES = 4  # held by a stage: two receives posted ahead, and one send in each direction
ITEMSIZE = {"float32": 4, "bf16": 2}
# Bytes of a parameter, its gradient and its optimizer state, by the type of the parameters. With bf16 the
# optimizer's state includes a float32 parameter.
STATE = {"float32": (4, 4, 8), "bf16": (2, 2, 12)}


@dataclass(frozen=True)
class Memory:
    """Holds the bytes of one rank by what they are for."""

    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    temporary: float  # logits, gathered units, and what one layer recomputes
    in_flight: float = 0.0  # messages between stages
    deferred: float = 0.0  # for weight gradients that are computed later

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return sum(vars(self).values())


def predict_memory(shape: AnyShape, sizes: ParallelSizes, batch: int, autocast: bool = False) -> Memory:
    """Return what the fullest rank of a plan holds at its peak, with `batch` examples in a step."""
    of_ranks = (
        replace(
            memory_of_rank(shape, sizes, batch, rank, autocast), deferred=_deferred(shape, sizes, batch, rank)
        )
        for rank in fullest_ranks(sizes)
    )
    fullest = max(of_ranks, key=lambda memory: memory.total)
    if sizes.pipeline == 1:
        return fullest
    size = tokens_of(shape, sizes, batch) * shape.width * ITEMSIZE[sizes.precision]
    size /= sizes.tensor if sizes.sequence_parallel else 1
    messages = MESSAGES
    if isinstance(shape, MLPShape) and not sizes.recompute:  # its layers' activations are outputs alone
        messages += theory.held(sizes.schedule, sizes.pipeline, sizes.microbatches, sizes.chunks, 0)
    return replace(fullest, in_flight=messages * size)


def memory_of_rank(
    shape: AnyShape, sizes: ParallelSizes, batch: int, rank: int, autocast: bool = False
) -> Memory:
    """Return what the ranks at place `rank` of the pipeline hold at their peak."""
    numbers, tokens = parameters_of(shape, sizes, rank), tokens_of(shape, sizes, batch)
    parameter, gradient, optimizer_state = state_bytes(sizes, autocast)
    full = Held(numbers * parameter, numbers * gradient, numbers * optimizer_state)
    state = formula(sizes.zero, full, sizes.replicas)
    c, divided = ITEMSIZE[sizes.precision], sizes.tensor if sizes.sequence_parallel else 1
    layers = layers_of(shape, sizes, rank) / (sizes.num_stages // sizes.pipeline)  # of a stage
    kept = layers * tokens * layer_activations(shape, sizes)
    temporary = 0.0
    if sizes.recompute:  # only inputs are kept: of each layer, or in a pipeline of each stage
        parts = layers if sizes.pipeline == 1 else 1
        temporary += kept / parts  # of one of them, which is computed again
        kept = parts * tokens * shape.width * c / divided
    if has_head(sizes, rank):  # the final norm; logits, and their softmax or gradient in float32
        norm, logits = shape.last_numbers
        temporary += tokens * (norm * c / divided + logits / sizes.tensor * (c + 4))
    if sizes.zero == 3:
        layer = sum(shape.dense_parameters) + sum(shape.expert_parameters)
        temporary += layer / sizes.tensor * (2 * parameter + gradient)
    held = theory.held(sizes.schedule, sizes.pipeline, sizes.microbatches, sizes.chunks, rank)
    return Memory(state.parameters, state.gradients, state.optimizer_state, held * kept, temporary)


def layer_activations(shape: AnyShape, sizes: ParallelSizes) -> float:
    """Return the bytes that a forward of one layer keeps for the backward, for each token of a microbatch.

    For a GPT in 16 bit with dropout and no fused attention, s b tokens have s b h (10 + 24/t + 5 a s / (h t))
    bytes, equation 2 of Korthikanti et al., with t tensor ranks, a heads and width h. With sequence
    parallelism all terms are divided by t, equation 4. With all-to-alls along the context axis there are two
    outputs of attention: before the second all-to-all and after it.
    """
    c = ITEMSIZE[sizes.precision]
    kept = shape.kept_bytes(c).on_a_rank(sizes.tensor, sizes.sequence_parallel)
    exchanged = sizes.context > 1 and sizes.attention == "all_to_all"
    return kept + exchanged * shape.query_width * c / sizes.tensor


def _deferred(shape: AnyShape, sizes: ParallelSizes, batch: int, rank: int) -> float:
    """Return what a rank holds for weight gradients that it computes later, beyond its activations.

    A weight gradient needs the layer's input and the gradient of its output. In a transformer both together
    are as large as the activations, and an input gradient frees all others, so nothing is added. In an MLP
    they are twice as large. With recomputation the activations are there only from the input gradient on.
    With tensor parallelism no weight gradient is deferred: column-parallel layers compute both at once.
    """
    after = 2.0 if isinstance(shape, MLPShape) else 1.0
    splits = sizes.schedule in ("zb_h1", "zb_v") and sizes.pipeline > 1 and sizes.tensor == 1
    if not splits or (after == 1 and not sizes.recompute):
        return 0.0
    schedule = sizes.schedule, sizes.pipeline, sizes.microbatches
    most = _most_held(*schedule, 0.0 if sizes.recompute else 1.0, after)[rank]
    held = 1 if sizes.recompute else theory.held(*schedule, sizes.chunks, rank)
    layers = layers_of(shape, sizes, rank) / (sizes.num_stages // sizes.pipeline)
    kept = layers * tokens_of(shape, sizes, batch) * layer_activations(shape, sizes)
    return max(0.0, most - held) * kept


@cache
def _most_held(schedule: str, pipeline: int, microbatches: int, before: float, after: float) -> list[float]:
    """Return how many microbatches each rank holds at most while weight gradients wait: `before` of one from
    its forward to its input gradient, and `after` of one from there to its weight gradient."""
    change = {FORWARD: before, INPUT_GRADIENT: after - before, WEIGHT_GRADIENT: -after}
    table = table_of(schedule, pipeline, microbatches)
    return [max(accumulate(change[action.kind] for action in row)) for row in table]


def state_bytes(sizes: ParallelSizes, autocast: bool) -> tuple[int, int, int]:
    """Return the bytes of a parameter, its gradient and optimizer state; autocast leaves all in float32."""
    return STATE["float32" if autocast else sizes.precision]


def tokens_of(shape: AnyShape, sizes: ParallelSizes, batch: int) -> float:
    """Return the number of tokens of a microbatch on one rank."""
    return batch / (sizes.data * sizes.microbatches) * shape.sequence_length / sizes.context


@cache
def layers_by_stage(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage: as even as possible, and longer ones from stage 1 on."""
    least, longer = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1]  # with one stage, the last two are the same
    return tuple(least + (order.index(stage) < longer) for stage in range(num_stages))


def layers_of(shape: AnyShape, sizes: ParallelSizes, rank: int) -> int:
    """Return the number of layers of a pipeline rank, in all its stages together."""
    by_stage = layers_by_stage(shape.num_layers, sizes.num_stages)
    if sizes.schedule == "zb_v":  # a rank has a stage on the way down, and the one opposite on the way up
        return by_stage[rank] + by_stage[-1 - rank]
    return sum(by_stage[rank :: sizes.pipeline])


def fullest_ranks(sizes: ParallelSizes) -> set[int]:
    """Return the pipeline ranks of which one holds the most, and one computes the most.

    Rank 1 has as many layers as any other. The first and the last have the ends, or hold the most.
    """
    return {0, min(1, sizes.pipeline - 1), sizes.pipeline - 1}


def has_head(sizes: ParallelSizes, rank: int) -> bool:
    """Return whether the last stage is on this pipeline rank."""
    return rank == (0 if sizes.schedule == "zb_v" else sizes.pipeline - 1)


def parameters_of(shape: AnyShape, sizes: ParallelSizes, rank: int) -> float:
    """Return the number of parameters of a rank: those of its pipeline rank, divided by the tensor axis.

    Norms, routers, some biases and learned positions are not divided. Of the experts it has its share.
    """
    layers, t = layers_of(shape, sizes, rank), sizes.tensor
    numbers = layers * shape.dense_parameters.on_a_rank(t) + experts_of(shape, sizes, rank)
    if rank == 0:
        numbers += shape.first_parameters.on_a_rank(t)
    if has_head(sizes, rank) and not (rank == 0 and shape.tied):
        numbers += shape.head_parameters / t
    return numbers


def experts_of(shape: AnyShape, sizes: ParallelSizes, rank: int) -> float:
    """Return the number of parameters of a rank's experts, of which expert ranks have equal shares."""
    layers = layers_of(shape, sizes, rank)
    return layers * shape.expert_parameters.on_a_rank(sizes.tensor) / sizes.expert_ranks

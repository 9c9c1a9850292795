"""Predict the bytes that a rank holds at the peak of a training step.

zero/memory.py divides parameters, gradients and AdamW's state, and the schedule's formula says how many
microbatches a rank holds (pipeline_parallel/analysis/theory.py). What a zero-bubble schedule holds for weight
gradients that wait is left out: the inputs of layers and the gradients of their outputs are together as large
as the activations.

After Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, section 3.1, and Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022, arXiv:2205.05198, section 4.
"""

from dataclasses import dataclass
from functools import cache

from hybrid_parallel.planner.shapes import ModelShape
from hybrid_parallel.sizes import ParallelSizes
from pipeline_parallel.analysis import theory
from pipeline_parallel.schedules import V_SHAPED
from zero.memory import Held, formula

MESSAGES = 4  # held by a stage: two receives posted ahead, and one send in each direction
RUNTIME_BYTES = 8e6  # buckets, connections and gaps between tensors: measured with benchmarks/planner.py
ITEMSIZE = {"float32": 4, "bf16": 2}
# Bytes of a parameter, its gradient and its optimizer state, by the type of the parameters, which autocast
# leaves in float32. With bf16 the optimizer's state includes a float32 parameter.
STATE = {"float32": (4, 4, 8), "bf16": (2, 2, 12)}


@dataclass(frozen=True)
class Memory:
    """Holds the bytes of one rank by what they are for."""

    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    temporary_tensors: float  # logits, gathered units, and what one layer recomputes
    buffers: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def predict_memory(shape: ModelShape, sizes: ParallelSizes, batch: int, autocast: bool = False) -> Memory:
    """Return what the fullest rank of a plan holds at its peak, with `batch` examples in a step."""
    ranks = (rank_memory(shape, sizes, batch, rank, autocast) for rank in fullest_ranks(sizes))
    return max(ranks, key=lambda memory: memory.total)


def rank_memory(shape: ModelShape, sizes: ParallelSizes, batch: int, rank: int, autocast: bool) -> Memory:
    """Return what the ranks at place `rank` of the pipeline hold at their peak."""
    numbers, tokens = num_parameters_of(shape, sizes, rank), tokens_of(shape, sizes, batch)
    of_each, c = STATE["float32" if autocast else sizes.precision], ITEMSIZE[sizes.precision]
    state = formula(sizes.zero, Held(*(numbers * each for each in of_each)), sizes.replicas)
    stream = tokens * on_a_rank((0.0, shape.width * c), sizes)
    layers = num_layers_of(shape, sizes, rank) / (sizes.num_stages // sizes.pipeline)  # of a stage
    kept = layers * tokens * layer_activations(shape, sizes)
    temporary = 0.0
    if sizes.recompute:  # only inputs are kept: of each layer, or in a pipeline of each stage
        parts = layers if sizes.pipeline == 1 else 1
        temporary += kept / parts  # of one of them, which is computed again
        kept = parts * stream
    if has_head(sizes, rank):  # logits, and their softmax or gradient in float32
        temporary += tokens * shape.vocab_size / sizes.tensor * (c + 4)
    if sizes.zero == 3:
        layer = shape.dense_parameters + shape.expert_parameters
        temporary += layer / sizes.tensor * (2 * of_each[0] + of_each[1])
    held = theory.most_held(sizes.schedule, sizes.pipeline, sizes.microbatches, sizes.chunks, rank)
    buffers = RUNTIME_BYTES + MESSAGES * stream * (sizes.pipeline > 1)
    return Memory(**vars(state), activations=held * kept, temporary_tensors=temporary, buffers=buffers)


def layer_activations(shape: ModelShape, sizes: ParallelSizes) -> float:
    """Return the bytes that a forward of one layer keeps for the backward, for each token of a microbatch:
    in 16 bit with dropout and no fused attention equation 2 of Korthikanti et al., or 4 if divided by tokens.
    """
    return on_a_rank(shape.kept_bytes(ITEMSIZE[sizes.precision]), sizes)


def on_a_rank(numbers: tuple[float, float], sizes: ParallelSizes) -> float:
    """Return what a tensor rank has: a share of the first number, and the second one in full, unless with
    sequence parallelism the ranks divide the tokens."""
    divided, replicated = numbers
    return divided / sizes.tensor + replicated / (sizes.tensor if sizes.sequence_parallel else 1)


def tokens_of(shape: ModelShape, sizes: ParallelSizes, batch: int) -> float:
    """Return the number of tokens of a microbatch on one rank."""
    return batch / (sizes.data * sizes.microbatches) * shape.block_size / sizes.context


@cache
def layers_by_stage(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage: as even as possible, and longer ones from stage 1 on."""
    least, longer = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1]  # with one stage, the last two are the same
    return tuple(least + (order.index(stage) < longer) for stage in range(num_stages))


def num_layers_of(shape: ModelShape, sizes: ParallelSizes, rank: int) -> int:
    """Return the number of layers of a pipeline rank, in all its stages together."""
    by_stage = layers_by_stage(shape.num_layers, sizes.num_stages)
    if sizes.schedule in V_SHAPED:  # a rank has a stage on the way down, and the one opposite on the way up
        return by_stage[rank] + by_stage[-1 - rank]
    return sum(by_stage[rank :: sizes.pipeline])


def fullest_ranks(sizes: ParallelSizes) -> set[int]:
    """Return the pipeline ranks of which one holds the most, and one computes the most: those with the ends,
    and rank 1, which has as many layers as any other."""
    return {0, min(1, sizes.pipeline - 1), sizes.pipeline - 1}


def has_head(sizes: ParallelSizes, rank: int) -> bool:
    """Return whether the last stage is on this pipeline rank."""
    return rank == (0 if sizes.schedule in V_SHAPED else sizes.pipeline - 1)


def num_parameters_of(shape: ModelShape, sizes: ParallelSizes, rank: int) -> float:
    """Return the number of parameters of a rank: its layers, divided by the tensor axis, and its experts."""
    numbers = num_layers_of(shape, sizes, rank) * shape.dense_parameters
    ends = (rank == 0) + (has_head(sizes, rank) and not (rank == 0 and shape.tied))  # embedding, head
    numbers += ends * shape.head_parameters
    return numbers / sizes.tensor + num_experts_of(shape, sizes, rank)


def num_experts_of(shape: ModelShape, sizes: ParallelSizes, rank: int) -> float:
    """Return the number of parameters of a rank's experts, of which expert ranks have equal shares."""
    return num_layers_of(shape, sizes, rank) * shape.expert_parameters / sizes.tensor / sizes.expert_ranks

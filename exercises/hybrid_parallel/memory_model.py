"""The memory of a rank. Write `memory_of_rank` of hybrid_parallel/planner/memory.py.

Read notebooks/09_everything_on_one_mesh.ipynb first. Do not open hybrid_parallel/planner/memory.py yet: it
contains the solution.

You may use:

    AnyShape = ModelShape | MLPShape
    formula(stage: int, full: Held, ranks: int) -> Held
        Return what one of `ranks` ranks holds with a stage of ZeRO, if one process holds `full`.
    has_head(sizes: ParallelSizes, rank: int) -> bool
        Return whether the last stage is on this pipeline rank.
    Held(parameters: float, gradients: float, optimizer_state: float)
        The sizes in bytes of the parameters, the gradients and the optimizer's state.
    ITEMSIZE = {'float32': 4, 'bf16': 2}
    layer_activations(shape: AnyShape, sizes: ParallelSizes) -> float
        Return the bytes that a forward of one layer keeps for the backward, for each token of a
        microbatch.
    layers_of(shape: AnyShape, sizes: ParallelSizes, rank: int) -> int
        Return the number of layers of a pipeline rank, in all its stages together.
    Memory(parameters: float, gradients: float, optimizer_state: float, activations: float, temporary:
            float, in_flight: float = 0.0, deferred: float = 0.0)
        Holds the bytes of one rank by what they are for.
    ParallelSizes(pipeline: int = 1, data: int = 1, context: int = 1, tensor: int = 1, expert_ranks: int =
            1, zero: Zero = 0, attention: Attention = 'ring', sequence_parallel: bool = False, schedule:
            Schedule = '1f1b', chunks: int = 2, microbatches: int = 1, recompute: bool = False, precision:
            Precision = 'float32', pattern: str | None = None)
        Holds the number of ranks along each axis, and what the ranks of an axis do.
    parameters_of(shape: AnyShape, sizes: ParallelSizes, rank: int) -> float
        Return the number of parameters of a rank: those of its pipeline rank, divided by the tensor
        axis.
    shape.dense_parameters: Numbers
        Return the parameters of a layer without its experts.
    shape.expert_parameters: Numbers
        Return the parameters of all experts of a layer.
    shape.last_numbers: tuple[int, int]
        Return the numbers that the last stage holds for each token: of its norm, and the logits.
    sizes.num_stages: int
        Return the number of stages into which the model is cut, over all ranks of a pipeline.
    sizes.replicas: int
        Return the number of ranks that train the same parameters with different tokens.
    state_bytes(sizes: ParallelSizes, autocast: bool) -> tuple[int, int, int]
        Return the bytes of a parameter, of its gradient and of its optimizer state.
    theory.held(schedule: str, ranks: int, microbatches: int, chunks: int, rank: int) -> int
        Return the most microbatches that the rank holds at a time, counted once for each stage that
        holds it.
    tokens_of(shape: AnyShape, sizes: ParallelSizes, batch: int) -> float
        Return the number of tokens of a microbatch on one rank.
    shape.width: int, sizes.chunks: int, sizes.microbatches: int, sizes.pipeline: int, sizes.precision:
    Precision, sizes.recompute: bool, sizes.schedule: Schedule, sizes.sequence_parallel: bool,
    sizes.tensor: int, sizes.zero: Zero

Check it with `python -m exercises check memory_model`.
"""

from hybrid_parallel.planner.memory import (
    ITEMSIZE,
    Memory,
    has_head,
    layer_activations,
    layers_of,
    parameters_of,
    state_bytes,
    tokens_of,
)
from hybrid_parallel.planner.shapes import AnyShape
from hybrid_parallel.sizes import ParallelSizes
from pipeline_parallel.analysis import theory
from zero.memory import Held, formula


def memory_of_rank(
    shape: AnyShape, sizes: ParallelSizes, batch: int, rank: int, autocast: bool = False
) -> Memory:
    """Return what the ranks at place `rank` of the pipeline hold at their peak.

    `batch` is the number of examples in a step over all ranks. ZeRO divides among all replicas: the
    ranks of the context axis, which cut sequences, hold the same parameters, too. `autocast` is for
    state_bytes. Return a `Memory` with the bytes of the following fields, and leave `in_flight` and
    `deferred` at 0, because other functions add them:

        parameters, gradients,     parameters_of the rank, each with the three sizes of state_bytes in
        optimizer_state            this order, divided by ZeRO (`stage` of `formula` is that of ZeRO)
        activations                of each layer of the rank, for each microbatch that is held.
                                   theory.held counts a microbatch once for each stage that holds it,
                                   and each stage of the rank has an equal part of the rank's layers
        temporary                  the sum of these. Recomputation: the activations of one layer, in a
                                   pipeline of the layers of one stage. The rank with the head: for
                                   each token the numbers of the final norm in the precision, and the
                                   logits twice, in the precision and in float32. ZeRO 3: the
                                   parameters of two layers, and the gradients of one

    `layer_activations` is already divided by the tensor axis, and does not know of recomputation.
    With recomputation only the input of each layer is kept, or in a pipeline that of each stage:
    shape.width numbers for each token in the precision. Sequence parallelism divides that input and
    the final norm among the ranks of the tensor axis. The tensor axis always divides the logits and
    the layer's parameters; `shape.last_numbers` and `shape.layer_parameters` are not divided yet.
    """
    raise NotImplementedError("`memory_of_rank` is not written yet.")

"""Say how a job's ranks are divided: the number of ranks along the pipeline, data and tensor axes.

      8 ranks = 2 (pipeline) x 2 (data) x 2 (tensor)

Every rank has one coordinate along each of the three axes (mesh.py). `refuse_sizes` refuses a division that
makes no sense for a model and a batch, before the training begins, and says why.
"""

from dataclasses import dataclass
from typing import Literal

from lab.errors import WorkbookError
from lab.model import GPTConfig, MLPConfig
from pipeline_parallel.schedules import SCHEDULES, stages_per_rank

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]
Precision = Literal["float32", "bf16"]
Zero = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class ParallelSizes:
    """Holds the number of ranks along each axis, and what the ranks of an axis do.

    `zero` is the stage of ZeRO along the data axis; 0 keeps a full copy on each of its ranks. `chunks` is the
    number of stages that each rank has with the interleaved schedule. `pattern` names the algorithm of the
    collectives; None takes the fastest of the backend.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    zero: Zero = 0
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"
    chunks: int = 2
    microbatches: int = 1
    recompute: bool = False
    precision: Precision = "float32"
    pattern: str | None = None

    @property
    def world_size(self) -> int:
        """Return the number of ranks: the product of the axes."""
        return self.pipeline * self.data * self.tensor

    @property
    def num_stages(self) -> int:
        """Return the number of stages into which the model is cut, over all ranks of a pipeline."""
        return self.pipeline * stages_per_rank(self.schedule, self.chunks)

    @property
    def holders(self) -> int:
        """Return the number of ranks that hold one copy of the parameters together."""
        return self.pipeline * self.tensor * (self.data if self.zero == 3 else 1)

    def __str__(self) -> str:
        axes = f"{self.pipeline} (pipeline) x {self.data} (data) x {self.tensor} (tensor)"
        return f"{self.world_size} ranks = {axes}"


def refuse_sizes(
    sizes: ParallelSizes, config: GPTConfig | MLPConfig, batch_size: int, world_size: int
) -> None:
    """Raise WorkbookError if `world_size` ranks cannot train the model of `config` in this way.

    `batch_size` is the number of examples in a step, over all ranks together.
    """
    for axis in ("pipeline", "data", "tensor", "microbatches", "chunks"):
        if getattr(sizes, axis) < 1:
            raise WorkbookError(f"{axis} is {getattr(sizes, axis)}; it must be at least 1.")
    if sizes.world_size != world_size:
        raise WorkbookError(
            f"{sizes}, but there are {world_size} ranks: the product of the axes must be {world_size}."
        )
    if sizes.schedule not in SCHEDULES:
        raise WorkbookError(f"schedule is {sizes.schedule!r}; it must be one of {', '.join(SCHEDULES)}.")
    if sizes.zero not in (0, 1, 2, 3):
        raise WorkbookError(f"zero is {sizes.zero}; the stages of ZeRO are 1, 2 and 3, and 0 means none.")
    if sizes.zero > 1 and sizes.pipeline > 1:
        what = "send all its gradients" if sizes.zero == 2 else "gather all its parameters"
        raise WorkbookError(
            f"zero is {sizes.zero} beside a pipeline: a stage would {what} for each microbatch, or keep "
            "them in full during the step, as with zero 1; take zero 1, or one pipeline stage."
        )
    if isinstance(config, MLPConfig):
        _refuse_for_mlp(sizes)
    if sizes.sequence_parallel and sizes.tensor == 1:
        raise WorkbookError(
            "sequence_parallel divides tokens among the ranks of the tensor axis; make tensor at least 2."
        )
    for what, number in _divided_by_tensor(config):
        if number % sizes.tensor:
            raise WorkbookError(f"tensor is {sizes.tensor}; it must divide the model's {number} {what}.")
    if sizes.num_stages > config.num_layers and sizes.pipeline > 1:
        raise WorkbookError(
            f"{sizes.num_stages} stages need at least as many layers, and the model has {config.num_layers}."
        )
    parts = sizes.data * sizes.microbatches
    if batch_size % parts:
        raise WorkbookError(
            f"{batch_size} examples in a step cannot be divided evenly among {sizes.data} replicas with "
            f"{sizes.microbatches} microbatches each; take a multiple of {parts}."
        )


def _divided_by_tensor(config: GPTConfig | MLPConfig) -> list[tuple[str, int]]:
    """Return what the tensor axis divides, and how many there are."""
    if isinstance(config, MLPConfig):
        # Layers 0, 2, ... are divided by their outputs, which are the inputs that divide layers 1, 3, ...
        return [("outputs per layer", size) for size in config.sizes[1::2]]
    return [("query heads", config.num_heads), ("key and value heads", config.kv_heads)]


def _refuse_for_mlp(sizes: ParallelSizes) -> None:
    if sizes.sequence_parallel:
        raise WorkbookError("sequence_parallel divides tokens, and an MLP has none; leave it out.")
    if sizes.recompute and sizes.pipeline == 1:
        raise WorkbookError(
            "recompute would save no memory: a layer of an MLP keeps only its input. Leave it out, or take a "
            "pipeline, whose stages then keep only their first layer's input."
        )

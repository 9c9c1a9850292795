"""Define the options of the hybrid training: how the ranks are divided, and how each axis works."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

from expert_parallel.config import MoEConfig, refuse_choice
from hybrid_parallel.sizes import AttentionName, Compress, ParallelSizes, Precision, Schedule, Zero
from lab.launch.errors import WorkbookError
from lab.models.model import GPTConfig, MLPConfig
from training.arguments import ClipArgs, NotOffered, TrainArgs

Pattern = Literal["ring", "tree", "auto", "torch"]


@dataclasses.dataclass
class HybridArgs(ClipArgs, TrainArgs):
    """Train a small model with several kinds of parallelism together, on one mesh of ranks."""

    in_sight: ClassVar[set[str]] = {
        *("config", "pipeline", "tensor", "zero", "microbatches", "steps", "batch_size", "size", "link"),
        *("trace", "verbose", "json"),
    }

    config: str | None = None
    """YAML file with the run's configuration, such as configs/config.yaml. The other options then change its
    keys, where the batch size is that of a device (config.py)."""
    checkpoint_every: int = 0
    """Number of steps between two checkpoints, written while training continues. 0: one at the end only."""
    checkpoint_keep: int = 3
    """Number of checkpoints that stay in the folder."""
    model: Literal["gpt", "mlp"] = "gpt"
    """Model to train: gpt on text, or mlp on images of handwritten digits. The MLP is as wide as the GPT of
    --size."""
    layers: int = 8
    """Number of the GPT's blocks, or of the MLP's linear layers, whatever the --size."""
    pipeline: int | None = None
    """Number of ranks along the pipeline axis: each has other layers. Without axes, ZeRO, experts and what
    sends less, an even number of ranks is divided into 2 stages, and a multiple of 4 also into 2 tensor
    ranks. Otherwise None is 1."""
    data: int | None = None
    """Number of ranks along the data axis: each has other examples. None: as many as the other axes leave."""
    context: int = 1
    """Number of ranks along the context axis: each has some tokens of every sequence."""
    attention: AttentionName = "ring"
    """Attention to the tokens of other ranks of the context axis: ring sends keys and values round, and
    all_to_all divides heads instead of tokens."""
    tensor: int | None = None
    """Number of ranks along the tensor axis: each has a part of every layer. None: as `pipeline` says."""
    zero: Zero = 0
    """Number of ZeRO's stage along the data axis: 1 divides the optimizer's state, 2 the gradients too, 3 the
    parameters too. 0: each rank of the axis has a full copy."""
    compress: Compress = None
    """Compressor of the gradients along the data axis (low_communication/compressors.py): bf16 and int8 send
    fewer bits of each number, topk the largest 1%, powersgd two thin matrices for each. None: all in full."""
    sync_every: int = 1
    """Number of steps that each replica trains alone before the replicas average their parameters. 1: they
    average the gradients in each step."""
    experts: int = 1
    """Number of experts in each block, in place of its MLP. 1: the plain MLP."""
    top_k: int = 2
    """Number of experts that a token passes, where there are several."""
    capacity: float | None = None
    """Let a rank send an expert at most this number times the mean, its tokens * top_k / experts, and drop
    the others. None: no token is dropped."""
    expert_ranks: int = 1
    """Number of replicas, along the data and context axes, among which the experts of a block are divided."""
    aux_weight: float = 0.01
    """Number by which the term of the loss that keeps experts equally busy is multiplied. 0: no such term."""
    sequence_parallel: bool = False
    """Divide norms, dropout and residuals by tokens among the ranks of the tensor axis."""
    schedule: Schedule = "1f1b"
    """Order of the microbatches' forwards and backwards in the pipeline."""
    chunks: int = 2
    """Number of stages that each rank has, in the interleaved schedule only."""
    microbatches: int | None = None
    """Number of equal parts of a replica's batch, which follow each other through the pipeline. None: in a
    pipeline about four for each stage, else 1."""
    recompute: bool = False
    """Keep only the input of each block, and compute its forward again in the backward."""
    precision: Precision = "float32"
    """Type of numbers in which the model computes. Parameters and optimizer stay in float32."""
    pattern: Literal[Pattern, None] = None
    """Algorithm of the collectives: a ring, a tree, the fastest of ours as measured (auto), or PyTorch's own.
    None: the backend's default."""
    metronome: NotOffered = None

    def made_with(self) -> dict[str, Any]:
        """Return what another run must have, too, to go on from this one's checkpoint."""
        experts = self.chosen("experts", "top_k", "capacity", "aux_weight") | {"balance": "aux"}
        return super().made_with() | (experts if self.experts > 1 else {})

    def validate(self, world_size: int) -> None:
        """Raise WorkbookError for options that the hybrid training does not offer, or has no use for."""
        if not 0 <= self.aux_weight < math.inf:
            raise WorkbookError(f"--aux-weight {self.aux_weight:g}: it is a number from 0, such as 0.01.")
        moe_of(self)
        if self.checkpoint_every < 0:
            raise WorkbookError(f"--checkpoint-every {self.checkpoint_every}: it is a number of steps, or 0.")
        if self.checkpoint_keep < 1:
            raise WorkbookError(f"--checkpoint-keep {self.checkpoint_keep}: at least 1 checkpoint must stay.")
        if self.sync_every > 1 and self.checkpoint is not None:
            raise WorkbookError(
                f"--checkpoint and --sync-every {self.sync_every}: a checkpoint has one model, and replicas "
                "that train alone differ; leave one of the two out."
            )


def sizes_of(args: HybridArgs, world_size: int) -> ParallelSizes:
    """Return how the ranks are divided. Raise WorkbookError if the axes do not divide their number."""
    sizes = {field.name: getattr(args, field.name) for field in dataclasses.fields(ParallelSizes)}
    given = [sizes[axis] for axis in ("pipeline", "data", "tensor")]
    others = args.context, args.zero, args.experts, args.compress, args.sync_every
    if given == [None] * 3 and others == (1, 0, 1, None, 1):
        sizes |= {"pipeline": 1 if world_size % 2 else 2, "tensor": 1 if world_size % 4 else 2}
    sizes |= {axis: 1 for axis in ("pipeline", "tensor") if sizes[axis] is None}
    if sizes["data"] is None:
        product = sizes["pipeline"] * sizes["context"] * sizes["tensor"]
        if product < 1 or world_size % product:
            axes = ", ".join(f"{axis} is {sizes[axis]}" for axis in ("pipeline", "context", "tensor"))
            raise WorkbookError(f"{axes}; their product must divide the number of ranks, {world_size}.")
        sizes["data"] = world_size // product
    if sizes["microbatches"] is None:
        examples = args.batch_size // max(1, sizes["data"])
        most = min(examples, 4 * sizes["pipeline"]) if sizes["pipeline"] > 1 else 1
        sizes["microbatches"] = next((n for n in range(most, 0, -1) if examples % n == 0), 1)
    return ParallelSizes(**sizes)


def model_of(args: HybridArgs) -> GPTConfig | MLPConfig:
    """Return the sizes of the model."""
    if args.layers < 1:
        raise WorkbookError(f"--layers {args.layers}: there must be at least one.")
    gpt = GPTConfig.named(args.size, num_layers=args.layers)
    return gpt if args.model == "gpt" else MLPConfig(args.layers, gpt.width)


def moe_of(args: HybridArgs) -> MoEConfig | None:
    """Return the sizes of the experts, or None without any. Raise WorkbookError if they make no sense."""
    if args.experts == 1:
        return None
    moe = MoEConfig(args.experts, args.top_k, args.capacity)
    refuse_choice(moe)
    return moe

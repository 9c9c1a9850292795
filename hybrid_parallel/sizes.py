"""Say how a job's ranks are divided: the number of ranks along each axis of the mesh.

      8 ranks = 2 (pipeline) x 2 (data) x 2 (tensor)

`refuse_sizes` refuses a division that makes no sense for a model and a batch, and says why.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from lab.launch.errors import WorkbookError
from lab.models.model import GPTConfig, MLPConfig
from pipeline_parallel.schedules import V_SHAPED, stages_per_rank

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"]
Precision = Literal["float32", "bf16"]
Zero = Literal[0, 1, 2, 3]
AttentionName = Literal["ring", "all_to_all"]
Compress = Literal["bf16", "int8", "topk", "powersgd", None]


@dataclass(frozen=True)
class ParallelSizes:
    """Holds the number of ranks along each axis, and what the ranks of an axis do.

    The options of HybridArgs (arguments.py) explain each of them.
    """

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert_ranks: int = 1
    zero: Zero = 0
    attention: AttentionName = "ring"
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"
    chunks: int = 2
    microbatches: int = 1
    recompute: bool = False
    precision: Precision = "float32"
    pattern: str | None = None
    compress: Compress = None
    sync_every: int = 1

    @property
    def world_size(self) -> int:
        """Return the number of ranks: the product of the axes."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def replicas(self) -> int:
        """Return the number of ranks that train the same parameters with different tokens."""
        return self.data * self.context

    @property
    def num_stages(self) -> int:
        """Return the number of stages into which the model is cut, over all ranks of a pipeline."""
        return self.pipeline * stages_per_rank(self.schedule, self.chunks)

    @property
    def holders(self) -> int:
        """Return the number of ranks that hold one copy of the parameters together."""
        return self.pipeline * self.tensor * (self.replicas if self.zero == 3 else 1)

    def __str__(self) -> str:
        names = ["pipeline", "data", *["context"] * (self.context > 1), "tensor"]
        axes = " x ".join(f"{getattr(self, axis)} ({axis})" for axis in names)
        return f"{self.world_size} ranks = {axes}"


def refuse_sizes(
    sizes: ParallelSizes,
    config: GPTConfig | MLPConfig,
    batch_size: int,
    world_size: int,
    num_experts: int = 1,
) -> None:
    """Raise WorkbookError if `world_size` ranks cannot train the model of `config` in this way.

    `batch_size` counts the examples of a step over all ranks.
    """
    others = "expert_ranks", "microbatches", "chunks", "sync_every"
    for axis in ("pipeline", "data", "context", "tensor", *others):
        if getattr(sizes, axis) < 1:
            raise WorkbookError(f"{axis} is {getattr(sizes, axis)}; it must be at least 1.")
    if sizes.world_size != world_size:
        raise WorkbookError(
            f"{sizes}, but there are {world_size} ranks: the product of the axes must be {world_size}."
        )
    of_model = _of_mlp(sizes, num_experts) if isinstance(config, MLPConfig) else _of_context(sizes, config)
    of_data = _of_data(sizes, num_experts)
    wrong = chain(of_model, _of_experts(sizes, num_experts), of_data, _of_layers(sizes, config, batch_size))
    if sentence := next(wrong, None):
        raise WorkbookError(sentence)


def _of_layers(sizes: ParallelSizes, config: GPTConfig | MLPConfig, batch_size: int) -> Iterator[str]:
    if sizes.zero > 1 and sizes.pipeline > 1:
        yield f"zero is {sizes.zero} beside a pipeline, where it saves no more than zero 1; take zero 1."
    if sizes.recompute and sizes.pipeline > 1 and sizes.schedule in ("zb_h1", *V_SHAPED):
        yield (
            f"recompute is not offered beside {sizes.schedule}: weight gradients that wait need the "
            "layers' inputs anyway. Leave it out, or take another schedule."
        )
    if sizes.sequence_parallel and sizes.tensor == 1:
        yield "sequence_parallel divides tokens among the ranks of the tensor axis; make tensor at least 2."
    if isinstance(config, MLPConfig):
        # Layers 0, 2, ... are divided by their outputs, which are the inputs that divide layers 1, 3, ...
        divided = [("outputs per layer", size) for size in config.sizes[1::2]]
    else:
        divided = [("query heads", config.num_heads), ("key and value heads", config.kv_heads)]
    for what, number in divided:
        if number % sizes.tensor:
            yield f"tensor is {sizes.tensor}; it must divide the model's {number} {what}."
    if sizes.num_stages > config.num_layers and sizes.pipeline > 1:
        number = sizes.num_stages
        yield f"{number} stages need at least as many layers, and the model has {config.num_layers}."
    parts = sizes.data * sizes.microbatches
    if batch_size % parts:
        yield (
            f"{batch_size} examples in a step cannot be divided evenly among {sizes.data} places along data "
            f"with {sizes.microbatches} microbatches each; take a multiple of {parts}."
        )


def _of_context(sizes: ParallelSizes, config: GPTConfig) -> Iterator[str]:
    if sizes.context == 1:
        return
    parts = sizes.context * (2 if sizes.attention == "ring" else 1)
    unit = math.lcm(parts, sizes.context * (sizes.tensor if sizes.sequence_parallel else 1))
    if config.block_size % unit:
        yield (
            f"context is {sizes.context}, and sequences have {config.block_size} tokens; their number must "
            f"be a multiple of {unit}, so that all ranks have equally many."
        )
    heads = config.kv_heads // sizes.tensor
    if sizes.attention == "all_to_all" and heads % sizes.context:
        yield (
            f"attention is all_to_all, and context is {sizes.context}; it must divide the {heads} key "
            "and value heads that a rank of the tensor axis has; take ring."
        )
    if sizes.attention == "ring" and config.dropout:
        yield "attention is ring, which cannot drop probabilities as the model does; take all_to_all."


def _of_experts(sizes: ParallelSizes, num_experts: int) -> Iterator[str]:
    ranks = f"expert_ranks is {sizes.expert_ranks}"
    if num_experts == 1 < sizes.expert_ranks:
        yield f"{ranks}, and the model has no experts; ask for some."
    if num_experts % sizes.expert_ranks:
        yield f"{ranks}; it must divide the {num_experts} experts in a layer."
    if sizes.replicas % sizes.expert_ranks:
        yield f"{ranks}; it must divide the {sizes.replicas} replicas, which are data x context ranks."
    if sizes.expert_ranks > 1 and sizes.zero:
        yield f"zero is {sizes.zero} and {ranks}: the two are not offered together; leave one of them out."
    if num_experts > 1 and sizes.sequence_parallel:
        yield "sequence_parallel gives a rank some of the tokens, and experts need all of them; leave it out."


def _of_data(sizes: ParallelSizes, num_experts: int) -> Iterator[str]:
    if not sizes.compress and sizes.sync_every == 1:
        return
    compress, alone = f"compress is {sizes.compress}", f"sync_every is {sizes.sync_every}"
    what, cure = compress if sizes.compress else alone, "leave one of them out"
    if sizes.compress and sizes.sync_every > 1:
        yield f"{compress} and {alone}: both make the data axis send less; {cure}."
    others = {"zero": sizes.zero, "context": sizes.context, "experts": num_experts}
    for name, number in others.items():
        if number > (0 if name == "zero" else 1):
            yield f"{what} and {name} is {number}: the two are not offered together; {cure}."
    if sizes.compress and sizes.pipeline > 1:
        yield (
            f"{what} and pipeline is {sizes.pipeline}: stages would round the embedding that they share in "
            f"two ways; {cure}, or take sync_every."
        )
    if sizes.data == 1:
        yield f"{what}, and the data axis has one rank, which sends nothing; make data at least 2."


def _of_mlp(sizes: ParallelSizes, num_experts: int) -> Iterator[str]:
    if sizes.context > 1:
        yield f"context is {sizes.context}, and an MLP has no sequences to cut; leave it out."
    if num_experts > 1:
        yield f"experts is {num_experts}, and an MLP has no blocks to put them in; take a gpt."
    if sizes.sequence_parallel:
        yield "sequence_parallel divides tokens, and an MLP has none; leave it out."
    if sizes.recompute and sizes.pipeline == 1:
        yield "recompute would save no memory: a layer of an MLP keeps only its input. Leave it out."

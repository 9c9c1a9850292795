"""Run the scripts of this folder: all ranks get the same sequences, and each computes some of the tokens."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

import training.arguments
import training.run
from comm.collectives import use_pattern
from context_parallel.arguments import validate_heads, validate_length
from context_parallel.block_attention import KERNELS, Kernel
from context_parallel.clock import Clock, ClockedGPT
from context_parallel.parallel_model import ContextParallel, Cut
from context_parallel.sequence_cut import SequenceCut
from lab.cluster import Cluster
from lab.models.model import GPTConfig
from lab.trace.memory import saved_activations
from training.arguments import NotOffered, Size
from training.evaluation import Sums, sums_of

CUTS: dict[str, Cut] = {"zigzag": SequenceCut.zigzag, "contiguous": SequenceCut.contiguous}
NEWLINE = 10


@dataclasses.dataclass
class Args(training.arguments.Args):
    """Train a small GPT on long sequences, each of them cut among the ranks."""

    batch_size: int = 2
    """Number of sequences in a step. All ranks work on all of them."""
    size: Size = "24heads"
    """Size of the GPT (lab/models/model.py). All-to-all attention needs a number of ranks that divides its
    number of heads: tiny and small have 4, 8layers and 13m have 8, 24heads has 24."""
    length: int = 1024
    """Number of tokens of a sequence. The number of ranks need not divide it."""
    documents: bool = False
    """Let a document begin after each empty line of the text, and attention stay within a document, as where
    several documents are packed into one sequence."""
    metronome: NotOffered = None


@dataclasses.dataclass
class RingArgs(Args):
    """Train a small GPT on long sequences, each of them cut among the ranks."""

    cut: Literal["zigzag", "contiguous"] = "zigzag"
    """Which tokens a rank gets. contiguous: an n-th in a row; under the causal mask the last rank then has
    most to compute. zigzag: an early and a late piece, so that all ranks compute equally much."""
    kernel: Literal["fused", "textbook"] = "fused"
    """Who computes attention to a block of keys. fused: PyTorch's kernel for CPUs. textbook: plain tensor
    operations, which store the scores of all pairs."""
    metronome: str | None = None
    """Replace computing by a clock: causal attention of a full sequence in one layer takes this time, such as
    40ms, and its backward twice that. A rank takes its part of it. Nothing is trained; messages stay real."""


def documents_of(tokens_bt: Tensor) -> Tensor:
    """Return the number of each token's document; one begins after each empty line."""
    is_newline = tokens_bt == NEWLINE
    begins = torch.zeros_like(tokens_bt)
    begins[:, 2:] = is_newline[:, :-2] & is_newline[:, 1:-1] & ~is_newline[:, 2:]
    return begins.cumsum(1)


class Run(training.run.Run):
    """One rank's side of a context parallel run: all ranks train on the same sequences."""

    def __init__(self, cluster: Cluster, args: Args, run_mode: str, needs_heads: bool = False) -> None:
        self._length, self._documents, self._needs_heads = args.length, args.documents, needs_heads
        super().__init__(cluster, args, run_mode, whole_batch=True)
        self._stream = cluster.rank  # a rank has its own tokens, so it draws its own dropout masks
        self.cut = CUTS[getattr(args, "cut", "contiguous")]
        use_pattern(args.pattern)
        self._activations: int | None = None

    def _gpt_config(self, args: training.arguments.TrainArgs) -> GPTConfig:
        assert isinstance(args, Args)
        validate_length(args.length)
        return GPTConfig.named(args.size, block_size=args.length)

    def _validate(self, args: training.arguments.TrainArgs) -> None:
        if self._needs_heads:
            validate_heads(self._config.kv_heads, self._cluster.world_size)
        super()._validate(args)

    def _made_with(self) -> dict[str, Any]:
        """Let any number of ranks go on, with either attention."""
        same = {"run_mode": "context_parallel", "length": self._length, "documents": self._documents}
        return super()._made_with() | same

    def model(self) -> nn.Module:
        if self._tick is None:
            return super().model()
        return ClockedGPT(self._config, seed=self._args.seed + self._cluster.rank).to(self._cluster.device)

    @property
    def kernel(self) -> Kernel:
        """Return who computes attention to a block of keys."""
        if self._tick is not None:
            return Clock(self._tick, self._length)
        return KERNELS[getattr(self._args, "kernel", "fused")]

    def documents(self, tokens_bt: Tensor) -> Tensor | None:
        """Return the documents of the sequences, or None without --documents."""
        return documents_of(tokens_bt) if self._documents else None

    @contextlib.contextmanager
    def observed(self, model: ContextParallel) -> Iterator[None]:
        """Count, in the first forward, the bytes of activations that autograd keeps."""
        if self._activations is not None:
            yield
            return
        with saved_activations(model.parameters) as saved:
            yield
        self._activations = saved.bytes

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean over all tokens, from each rank's term of it."""
        return super().mean_loss(loss.detach() * self._cluster.world_size)

    def sums(self, model: nn.Module, x: Tensor, y: Tensor, counts: Tensor) -> Sums | None:
        """Return the sums over this rank's tokens of a held-out batch."""
        assert isinstance(model, ContextParallel)
        return sums_of(model(x, self.documents(x)), model.own(y), counts)

    def finish(self, model: nn.Module, **extras: Any) -> dict[str, Any]:
        """Finish as training.run does; the replicas that are compared are the plain models."""
        assert isinstance(model, ContextParallel)
        return super().finish(model.module, activations_bytes=self._activations, **extras)

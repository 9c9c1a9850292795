"""Define the models that the lessons train: a small GPT, an MLP and a convolutional network.

Shapes by suffix: b batch, t time (position in the text), d model width, h heads, e width of one head,
v vocabulary, n images, c channels. `x_btd` is (batch, time, width).

Initial weights depend on the sizes and the seed alone. For another dtype: `GPT(config).double()`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.launch.errors import WorkbookError


@dataclass(frozen=True)
class GPTConfig:
    """Hold the sizes of a GPT. `num_heads` must divide `width`, and `num_kv_heads` must divide `num_heads`.

    `num_kv_heads` below `num_heads` lets several query heads share one key and value head (grouped-query
    attention, Ainslie et al. 2023, arXiv:2305.13245). None means a key and value head for each query head.
    """

    vocab_size: int = 256
    block_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    width: int = 256
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} must be a multiple of the {self.num_heads} heads")
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads {self.kv_heads} must divide the {self.num_heads} query heads")

    @classmethod
    def named(cls, name: str, **changes: Any) -> "GPTConfig":
        """Return `SIZES[name]` with some fields changed. Raise ValueError if there is no such size."""
        if name not in SIZES:
            raise ValueError(f"there is no GPT size {name!r}: choose one of {', '.join(SIZES)}")
        return replace(SIZES[name], **changes)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def flops_per_token(self) -> int:
        """Return the floating-point operations of a token in a training step.

        2 for each weight that it is multiplied with and 4 t d for the attention of a layer, and twice as many
        in the backward: Chowdhery et al., "PaLM", 2022, arXiv:2204.02311, appendix B. What is computed a
        second time (recomputation) does not count, and no mask saves anything.
        """
        key_width = self.width // self.num_heads * self.kv_heads
        layer = 2 * self.width * self.width + 2 * self.width * key_width + 8 * self.width * self.width
        weights = self.num_layers * layer + self.vocab_size * self.width
        return 6 * weights + 12 * self.num_layers * self.block_size * self.width


SIZES = {
    "tiny": GPTConfig(block_size=32, num_layers=2, num_heads=4, width=32),
    "small": GPTConfig(block_size=64, num_layers=4, num_heads=4, width=128),
    # Heads, tokens and features divide evenly among 2, 3, 4, 6 and 8 ranks.
    "24heads": GPTConfig(block_size=48, num_layers=4, num_heads=24, width=192),
    "8layers": GPTConfig(block_size=48, num_layers=8, num_heads=8, width=160),  # enough for 8 stages
    "13m": GPTConfig(block_size=256, num_layers=4, num_heads=8, width=512),
}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from a new stream in a `with` block, and restore the global stream at its end."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class Attention(nn.Module):
    """Apply causal self-attention: `x_btd` in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.dropout = config.dropout
        kv_width = config.kv_heads * self.head_width
        self.q_proj = nn.Linear(config.width, config.width)
        self.k_proj = nn.Linear(config.width, kv_width)
        self.v_proj = nn.Linear(config.width, kv_width)
        self.o_proj = nn.Linear(config.width, config.width)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.o_proj(self.attend(self.q_proj(x_btd), self.k_proj(x_btd), self.v_proj(x_btd)))

    def attend(self, *projected: Tensor) -> Tensor:
        """Attend with queries, keys and values, all (b, t, heads * e); return (b, t, query heads * e)."""
        # The number of heads comes from the projections' outputs, so a rank may hold only some heads.
        q_bhte, k_bhte, v_bhte = (y.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for y in projected)
        return self.attend_by_head(q_bhte, k_bhte, v_bhte).transpose(1, 2).flatten(2)

    def attend_by_head(self, q_bhte: Tensor, k_bhte: Tensor, v_bhte: Tensor) -> Tensor:
        """Attend in each head alone; return `y_bhte` of the queries' shape."""
        dropout = self.dropout if self.training else 0.0
        grouped = q_bhte.shape[1] != k_bhte.shape[1]
        return F.scaled_dot_product_attention(
            q_bhte, k_bhte, v_bhte, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )


class FeedForward(nn.Module):
    """Apply two linear layers around a GELU, where the width is 4 * d: `x_btd` in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.width, 4 * config.width)
        self.down_proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_btd)))


class Block(nn.Module):
    """Apply a pre-norm transformer block: `x_btd` in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_btd: Tensor) -> Tensor:
        x_btd = x_btd + self.dropout(self.attention(self.attention_norm(x_btd)))
        return x_btd + self.dropout(self.mlp(self.mlp_norm(x_btd)))


class GPT(nn.Module):
    """Implement a decoder-only transformer like GPT-2 (Radford et al. 2019), with GPT-2's initialisation."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with seeded(seed):
            self.token_embedding = nn.Embedding(config.vocab_size, config.width)
            self.position_embedding = nn.Embedding(config.block_size, config.width)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks: Any = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.final_norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
            if config.tied:
                self.head.weight = self.token_embedding.weight
            for name, parameter in self.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    # Each block adds two branches to the residual stream: keep the variance of the sum.
                    nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5)
                elif name.endswith("bias"):
                    nn.init.zeros_(parameter)
                elif parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.02)

    def embed(self, tokens_bt: Tensor, positions_t: Tensor | None = None) -> Tensor:
        """Return the blocks' input `x_btd` for tokens, at positions 0, 1, ... or at `positions_t`.

        Raise ValueError if t exceeds the block size.
        """
        if positions_t is None:
            positions_t = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        if len(positions_t) > self.config.block_size:
            raise ValueError(f"{len(positions_t)} tokens in a row exceed block_size {self.config.block_size}")
        return self.dropout(self.token_embedding(tokens_bt) + self.position_embedding(positions_t))

    def forward(self, tokens_bt: Tensor, positions_t: Tensor | None = None) -> Tensor:
        """Return `logits_btv` for int64 tokens."""
        x_btd = self.embed(tokens_bt, positions_t)
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.head(self.final_norm(x_btd))


IGNORED = -100  # a target that does not count, such as a prompt's; PyTorch's default


def loss_of(logits_btv: Tensor, targets_bt: Tensor, num_targets: float | None = None) -> Tensor:
    """Return the cross entropy in nats, a scalar: the mean over all targets that are not IGNORED.

    With `num_targets` the sum of the losses is divided by that number. Ranks or microbatches that share a
    step give the same one, because the mean of their means would be wrong (training/valid_targets.py). Raise
    WorkbookError without it where a wrapper's ranks may have unequal numbers of targets.
    """
    logits, targets = logits_btv.flatten(0, -2), targets_bt.flatten()
    if num_targets is None:
        if hasattr(logits_btv, "has_other_ranks") and (targets == IGNORED).any():
            raise WorkbookError(
                f"Some targets are {IGNORED}, so ranks have unequal numbers of valid targets, and the mean "
                "of their means is not the loss of one process: call loss_of(logits, targets, "
                "valid_targets(targets)), as training/valid_targets.py explains."
            )
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / num_targets


@dataclass(frozen=True)
class MLPConfig:
    """Hold the sizes of an MLP: `num_layers` linear layers, with `width` numbers between two of them."""

    num_layers: int = 8
    width: int = 128
    inputs: int = 64
    outputs: int = 10

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return how many numbers each layer takes, and at the end how many the last one returns."""
        return (self.inputs, *[self.width] * (self.num_layers - 1), self.outputs)


class MLP(nn.Module):
    """Apply linear layers with ReLU between them, from n inputs of sizes[0] numbers to (n, sizes[-1])."""

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.layers: Any = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.sizes = tuple(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class BabyCNN(nn.Module):
    """Apply two convolutions, a pooling, two linear layers: from `x_nchw` (c is 1) to (n, num_classes)."""

    def __init__(self, image_size: int = 8, num_classes: int = 10, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.conv1 = nn.Conv2d(1, 8, kernel_size=3, padding=1)
            self.conv2 = nn.Conv2d(8, 16, kernel_size=3, padding=1)
            self.linear1 = nn.Linear(16 * (image_size // 2) ** 2, 64)
            self.linear2 = nn.Linear(64, num_classes)

    def forward(self, x_nchw: Tensor) -> Tensor:
        x_nchw = F.relu(self.conv2(F.relu(self.conv1(x_nchw))))
        return self.linear2(F.relu(self.linear1(F.max_pool2d(x_nchw, 2).flatten(1))))

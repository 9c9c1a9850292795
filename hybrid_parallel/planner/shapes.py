"""Describe a GPT by the numbers that decide its memory and its time.

A layer is attention and a feed-forward network, or several experts, each with a norm before it. Biases,
norms, routers and learned positions are left out: in all but the smallest models they are less than 3 %. What
a layer keeps and moves has two parts: the ranks of a tensor axis divide one, and all have the rest.
"""

from dataclasses import dataclass, replace

from lab.launch.errors import WorkbookError
from lab.models.model import SIZES, GPTConfig


@dataclass(frozen=True)
class ModelShape(GPTConfig):
    """Holds the sizes of a decoder-only transformer: those of a GPT of this workbook, and the following.

    `active_experts` of the `experts` process a token; one expert means a dense model. `fused_attention`
    says whether attention is one kernel that keeps no scores (FlashAttention, Dao et al. 2022,
    arXiv:2205.14135) and skips the half that a causal mask removes.
    """

    feed_forward_width: int | None = None  # None: four times the width
    gated: bool = False
    experts: int = 1
    active_experts: int = 1
    fused_attention: bool = True

    @property
    def kv_width(self) -> int:
        """Return the width of all key heads together, which is that of all value heads."""
        return self.width // self.num_heads * self.kv_heads

    @property
    def hidden_numbers(self) -> int:
        """Return how many numbers of a token a feed-forward network computes before its output: those before
        and after the activation, and the gate. It has as many columns of weights."""
        return (3 if self.gated else 2) * (self.feed_forward_width or 4 * self.width)

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of all experts of a layer. The feed-forward of a dense model is no expert."""
        return self.experts * self.width * self.hidden_numbers if self.experts > 1 else 0

    @property
    def dense_parameters(self) -> int:
        """Return the parameters of a layer without its experts."""
        attention = 2 * self.width + 2 * self.kv_width  # queries and output; keys and values
        return self.width * (attention + (self.hidden_numbers if self.experts == 1 else 0))

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the head, and of the embedding of tokens."""
        return self.vocab_size * self.width

    def kept_bytes(self, c: int) -> tuple[float, float]:
        """Return the bytes that a layer keeps of a token for its backward, with numbers of c bytes: those
        that tensor ranks divide, and the others."""
        # The inputs of both norms, their outputs, and the masks of both residual branches.
        replicated = 4 * self.width * c + 2 * self.width * (self.dropout > 0)
        divided = (2 * self.width + 2 * self.kv_width) * c  # queries, keys, values; attention's output
        divided += self.active_experts * self.hidden_numbers * c
        if self.experts > 1:  # what goes to each expert, what comes back, and that times its weight
            replicated += 3 * self.active_experts * self.width * c
        if not self.fused_attention:
            divided += self.num_heads * self.block_size * (2 * c + (self.dropout > 0))
        return divided, replicated

    def moved_bytes(self, c: int) -> tuple[float, float]:
        """Return the bytes that a layer's forward reads and writes for a token outside of matrix products."""
        # Two norms read and write; two residual branches read two numbers and write one, and a mask.
        replicated = (4 + 6) * self.width * c + 2 * self.width * (self.dropout > 0)
        divided = self.active_experts * self.hidden_numbers * c
        if not self.fused_attention:
            # Scores: written by one product; read and written by softmax and by dropout; read by the other.
            divided += self.num_heads * self.block_size * (6 * c + 1 if self.dropout else 4 * c)
        return divided, replicated


def num_parameters(shape: ModelShape) -> int:
    """Return the number of a model's parameters; tied weights count once."""
    layers = shape.num_layers * (shape.dense_parameters + shape.expert_parameters)
    return layers + shape.head_parameters * (1 if shape.tied else 2)


def active_weights(shape: ModelShape) -> float:
    """Return the number of weights of a layer that one token is multiplied with."""
    return shape.dense_parameters + shape.expert_parameters * shape.active_experts / shape.experts


def flops_per_token(shape: ModelShape, causal: bool = False) -> float:
    """Return the operations of a token in a step, as `GPTConfig.flops_per_token` counts them. `causal` leaves
    out the half of the attention that the mask removes."""
    weights = shape.num_layers * active_weights(shape) + shape.head_parameters
    attention = 12 * shape.num_layers * shape.width * shape.block_size
    return 6 * weights + (attention / 2 if causal else attention)


def _llama(layers: int, width: int, heads: int, inner: int) -> ModelShape:
    sizes = 128_256, 8192, layers, heads, 8, width
    return ModelShape(*sizes, tied=False, feed_forward_width=inner, gated=True)


SHAPES = {
    "gpt-3-175b": ModelShape(51_200, 2048, 96, 96, None, 12_288),  # Brown et al. 2020, table 2.1
    # The Llama 3 Herd of Models, 2024, arXiv:2407.21783, table 3.
    "llama-3-8b": _llama(32, 4096, 32, 14_336),
    "llama-3-70b": _llama(80, 8192, 64, 28_672),
    "llama-3-405b": _llama(126, 16_384, 128, 53_248),
    # Jiang et al., "Mixtral of Experts", 2024, arXiv:2401.04088, table 1.
    "mixtral-8x7b": replace(_llama(32, 4096, 32, 14_336), vocab_size=32_000, experts=8, active_experts=2),
}
SHAPES |= {name: ModelShape(**vars(config)) for name, config in SIZES.items()}


def shape_of(model: str) -> ModelShape:
    """Return the shape of a model of SHAPES, or raise WorkbookError."""
    if model not in SHAPES:
        raise WorkbookError(
            f"There is no model {model!r}: choose one of {', '.join(SHAPES)}, or add its sizes to SHAPES in "
            "hybrid_parallel/planner/shapes.py."
        )
    return SHAPES[model]

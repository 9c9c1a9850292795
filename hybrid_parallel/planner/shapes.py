"""Describe a model by the numbers that decide its memory and its time.

A transformer's layer is attention and a feed-forward network, each with a norm before it. With d the model's
width, f the feed-forward width, k the width of all key heads, v the vocabulary:

    attention        d d + 2 k d + d d             queries, keys and values, output
    feed-forward     2 f d, gated 3 f d            one for each expert
    embeddings       v d, and v d for an untied head

Biases, norms, routers and learned positions are left out: in all but the smallest models they are less than
3 %. What a layer keeps and moves has two parts: the ranks of a tensor axis divide one, and all have the rest.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from lab.launch.errors import WorkbookError
from lab.models.model import SIZES, GPTConfig, MLPConfig


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
    def query_width(self) -> int:
        """Return the width of all query heads together, which divide the model's width."""
        return self.width

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
    def matrices(self) -> int:
        """Return the number of matrices of a dense layer."""
        return 7 if self.gated else 6

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of all experts of a layer. The feed-forward of a dense model is no expert."""
        return self.experts * self.width * self.hidden_numbers if self.experts > 1 else 0

    @property
    def dense_parameters(self) -> int:
        """Return the parameters of a layer without its experts."""
        feed_forward = self.hidden_numbers if self.experts == 1 else 0
        return self.width * (2 * self.width + 2 * self.kv_width + feed_forward)

    @property
    def first_parameters(self) -> int:
        """Return the parameters before the first layer: the embedding of tokens."""
        return self.vocab_size * self.width

    @property
    def end_weights(self) -> tuple[int, int]:
        """Return the numbers of weights, before and after the layers, that a token is multiplied with."""
        return 0, self.vocab_size * self.width

    @property
    def reductions(self) -> float:
        """Return how often the tensor axis adds up a token's width: after attention and each expert."""
        return 1.0 + self.active_experts

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


@dataclass(frozen=True)
class MLPShape(MLPConfig):
    """Describes an MLP by the numbers of a ModelShape. An example counts as one token, a class as one logit.

    A layer is a linear layer and a ReLU, and all layers count as equal: what the first and the last one have
    less stands where a transformer has its embedding and its head, as a negative number. Two layers in a row
    share a reduction: the first one is divided by its outputs, the second by its inputs.
    """

    block_size: ClassVar[int] = 1
    query_width: ClassVar[int] = 0  # an MLP has no attention
    kv_width: ClassVar[int] = 0
    matrices: ClassVar[int] = 1
    experts: ClassVar[int] = 1
    active_experts: ClassVar[int] = 1
    expert_parameters: ClassVar[int] = 0
    tied: ClassVar[bool] = False
    fused_attention: ClassVar[bool] = True
    reductions: ClassVar[float] = 0.5

    @property
    def vocab_size(self) -> int:
        return self.outputs

    @property
    def dense_parameters(self) -> int:
        return self.width**2

    @property
    def first_parameters(self) -> int:
        return self.end_weights[0]

    @property
    def end_weights(self) -> tuple[int, int]:
        return (self.inputs - self.width) * self.width, (self.outputs - self.width) * self.width

    def kept_bytes(self, c: int) -> tuple[float, float]:
        return self.width * c / 2, self.width * c / 2  # a layer's output; those of every second are divided

    def moved_bytes(self, c: int) -> tuple[float, float]:
        return self.width * c, self.width * c  # the ReLU reads and writes


AnyShape = ModelShape | MLPShape


def num_parameters(shape: AnyShape) -> int:
    """Return the number of a model's parameters; tied weights count once."""
    layers = shape.num_layers * (shape.dense_parameters + shape.expert_parameters)
    return layers + shape.first_parameters + (not shape.tied) * shape.end_weights[1]


def active_weights(shape: AnyShape) -> float:
    """Return the number of weights of a layer that one token is multiplied with."""
    return shape.dense_parameters + shape.expert_parameters * shape.active_experts / shape.experts


def flops_per_token(shape: AnyShape, causal: bool = False) -> float:
    """Return the operations of a token in a step, as `GPTConfig.flops_per_token` counts them. `causal` leaves
    out the half of the attention that the mask removes."""
    weights = shape.num_layers * active_weights(shape) + sum(shape.end_weights)
    attention = 12 * shape.num_layers * shape.query_width * shape.block_size
    return 6 * weights + (attention / 2 if causal else attention)


def _llama(layers: int, width: int, heads: int, inner: int) -> ModelShape:
    return ModelShape(
        128_256, 8192, layers, heads, 8, width, tied=False, feed_forward_width=inner, gated=True
    )


SHAPES = {
    "gpt-3-175b": ModelShape(51_200, 2048, 96, 96, None, 12_288),  # Brown et al. 2020, table 2.1
    # The Llama 3 Herd of Models, 2024, arXiv:2407.21783, table 3.
    "llama-3-8b": _llama(32, 4096, 32, 14_336),
    "llama-3-70b": _llama(80, 8192, 64, 28_672),
    "llama-3-405b": _llama(126, 16_384, 128, 53_248),
    # Jiang et al., "Mixtral of Experts", 2024, arXiv:2401.04088, table 1.
    "mixtral-8x7b": replace(_llama(32, 4096, 32, 14_336), vocab_size=32_000, experts=8, active_experts=2),
}


def shape_of(model: str) -> AnyShape:
    """Return the shape of a model of SHAPES or of this workbook, or raise WorkbookError."""
    if known := SHAPES.get(model):
        return known
    if config := (SIZES | {"mlp": MLPConfig()}).get(model):
        return shape_of_config(config)
    raise WorkbookError(
        f"There is no model {model!r}: choose one of {', '.join([*SHAPES, *SIZES, 'mlp'])}, or add its sizes "
        "to SHAPES in hybrid_parallel/planner/shapes.py."
    )


def shape_of_config(config: GPTConfig | MLPConfig, experts: int = 1, active_experts: int = 1) -> AnyShape:
    """Return the shape of a model of this workbook."""
    if isinstance(config, MLPConfig):
        return MLPShape(**vars(config))
    return ModelShape(**vars(config), experts=experts, active_experts=active_experts)

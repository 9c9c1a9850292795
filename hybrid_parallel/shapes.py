"""Describe a model by the numbers that decide its memory and its time: layers, widths, heads, vocabulary.

    shape_of("llama-3-8b")             a name of SHAPES, or one of this workbook's GPTs (lab/model.py)
    shape_of("my_model.yaml")          a file with the fields of ModelShape, see shape_files.py
    shape_of("checkpoint/config.json") the configuration of a Hugging Face model on disk

A layer is attention and a feed-forward network, each with a norm before it. Shapes by name: d model width,
f feed-forward width, q and k the widths of all query heads and of all key heads together, v vocabulary.

    attention        q d + 2 k d + d q             queries, keys and values, output
    feed-forward     2 f d, gated 3 f d            one for each expert, with d numbers of the router for each
    embeddings       v d, and v d for an untied head
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hybrid_parallel.mlp_shape import MLPShape
from lab.errors import WorkbookError
from lab.model import SIZES, GPTConfig, MLPConfig


@dataclass(frozen=True)
class ModelShape:
    """Holds the sizes of a decoder-only transformer. Raise WorkbookError if they cannot belong together.

    `active_experts` of the `experts` process a token; one expert means a dense model. `positions` is the
    number of learned position embeddings. `learns_bias` says whether linear layers and norms have a bias.
    `fused_attention` says whether attention is one kernel that keeps no scores (FlashAttention, Dao et al.
    2022, arXiv:2205.14135) and skips the half that a causal mask removes.
    """

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int
    sequence_length: int
    num_kv_heads: int | None = None
    head_width: int | None = None
    feed_forward_width: int | None = None
    gated: bool = False
    tied: bool = True
    learns_bias: bool = True
    positions: int = 0
    dropout: bool = False
    experts: int = 1
    active_experts: int = 1
    fused_attention: bool = True

    reductions: ClassVar[float] = 2.0  # of the tensor axis in the forward of a layer
    deferred_share: ClassVar[float] = 1.0  # of a layer's activations, that its weight gradients need
    kept_messages: ClassVar[int] = 0  # of a stage, besides the inputs of layers that `kept_bytes` counts

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < (name == "positions") ^ 1:
                raise WorkbookError(f"{name} of a model is {value}; it must be at least 1.")
        if self.num_heads % self.kv_heads:
            raise WorkbookError(
                f"A model with {self.num_heads} query heads cannot have {self.kv_heads} key and value heads: "
                "give it a divisor."
            )
        if self.head_width is None and self.width % self.num_heads:
            raise WorkbookError(f"{self.num_heads} heads must divide the width {self.width} of a model.")
        if self.active_experts > self.experts:
            raise WorkbookError(
                f"{self.active_experts} active experts are more than the model's {self.experts} experts."
            )

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads: by default one for each query head."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def query_width(self) -> int:
        """Return the width of all query heads together."""
        return self.num_heads * (self.head_width or self.width // self.num_heads)

    @property
    def kv_width(self) -> int:
        """Return the width of all key heads together, which is that of all value heads."""
        return self.query_width // self.num_heads * self.kv_heads

    @property
    def inner_width(self) -> int:
        """Return the width of the feed-forward network: by default four times the model's."""
        return 4 * self.width if self.feed_forward_width is None else self.feed_forward_width

    @property
    def attention_weights(self) -> int:
        """Return the number of weights in the linear layers of one attention."""
        return self.width * (2 * self.query_width + 2 * self.kv_width)

    @property
    def expert_weights(self) -> int:
        """Return the number of weights in the linear layers of one expert, or of a dense feed-forward."""
        return (3 if self.gated else 2) * self.width * self.inner_width

    @property
    def router_weights(self) -> int:
        """Return the number of weights that choose among the experts of a layer; a dense model has none."""
        return self.width * self.experts if self.experts > 1 else 0

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer, with all experts, norms and biases."""
        norms, biases = 2 * self.width, 0
        if self.learns_bias:
            norms *= 2
            biases = self.query_width + 2 * self.kv_width + self.width
            biases += self.experts * ((2 if self.gated else 1) * self.inner_width + self.width)
        linear = self.attention_weights + self.experts * self.expert_weights + self.router_weights
        return linear + norms + biases

    @property
    def replicated_parameters(self) -> int:
        """Return the number of parameters of a layer that tensor parallelism does not divide.

        These are its norms, and the biases of its two linear layers that are divided by their inputs.
        """
        return (4 + 1 + self.experts if self.learns_bias else 2) * self.width

    @property
    def active_weights(self) -> int:
        """Return the number of weights of a layer that one token is multiplied with."""
        return self.attention_weights + self.active_experts * self.expert_weights + self.router_weights

    @property
    def embedding_parameters(self) -> int:
        """Return the number of parameters before the first layer: tokens and positions."""
        return (self.vocab_size + self.positions) * self.width

    @property
    def head_parameters(self) -> int:
        """Return the number of weights of the head, which are the embedding's if they are tied."""
        return self.vocab_size * self.width

    @property
    def num_parameters(self) -> int:
        """Return the number of all parameters; tied weights count once."""
        final_norm = (2 if self.learns_bias else 1) * self.width
        head = 0 if self.tied else self.head_parameters
        return self.num_layers * self.layer_parameters + self.embedding_parameters + final_norm + head

    @property
    def column_weights(self) -> int:
        """Return the number of a layer's weights that tensor parallelism divides by their outputs."""
        return self.width * (self.query_width + 2 * self.kv_width + self.inner_width)

    @property
    def token_parameters(self) -> int:
        """Return the number of parameters before the first layer that tensor parallelism divides."""
        return self.vocab_size * self.width

    @property
    def end_weights(self) -> tuple[int, int]:
        """Return the numbers of weights, before and after the layers, that a token is multiplied with."""
        return 0, self.head_parameters

    @property
    def last_numbers(self) -> tuple[int, int]:
        """Return the numbers that the last stage holds for each token: of its norm, and the logits."""
        return 2 * self.width, self.vocab_size

    def kept_bytes(self, c: int) -> tuple[float, float]:
        """Return the bytes that a layer keeps of a token for its backward, with numbers of c bytes.

        First those that all tensor ranks have, unless tokens are divided; then those that are divided.
        """
        mask = 1 if self.dropout else 0
        # The inputs of both norms, their outputs, and the masks of both residual branches.
        replicated = 4 * self.width * c + 2 * self.width * mask
        divided = (2 * self.query_width + 2 * self.kv_width) * c  # queries, keys, values; attention's output
        # A feed-forward keeps what goes into and comes out of its activation; a gated one also the gate.
        divided += self.active_experts * (3 if self.gated else 2) * self.inner_width * c
        if not self.fused_attention:
            divided += self.num_heads * self.sequence_length * (2 * c + mask)
        return replicated, divided

    def moved_bytes(self, c: int) -> tuple[float, float]:
        """Return the bytes that a layer's forward reads and writes for a token outside of matrix products.

        First those that all tensor ranks move, unless tokens are divided; then those that are divided.
        """
        mask = 1 if self.dropout else 0
        # Two norms read and write; two residual branches read two numbers and write one, and a mask.
        replicated = (4 + 6) * self.width * c + 2 * self.width * mask
        divided = self.active_experts * (3 if self.gated else 2) * self.inner_width * c
        if not self.positions:  # rotary embeddings read and write queries and keys
            divided += 2 * (self.query_width + self.kv_width) * c
        if not self.fused_attention:
            # Scores: written by one product; read and written by softmax and by dropout; read by the other.
            divided += self.num_heads * self.sequence_length * ((6 if mask else 4) * c + mask)
        return replicated, divided

    def flops_per_token(self, causal: bool = False) -> float:
        """Return the floating-point operations of a token in one step: a forward, and a backward twice it.

        6 for each active weight, and 12 s q for the attention of each layer to a sequence of s tokens. So
        count Chowdhery et al., "PaLM", 2022, arXiv:2204.02311, appendix B, and Narayanan et al. 2021,
        arXiv:2104.04473, section 5.1. `causal` leaves out the half of the attention that the mask removes.
        """
        weights = self.num_layers * self.active_weights + self.head_parameters
        attention = 12.0 * self.num_layers * self.query_width * self.sequence_length
        return 6.0 * weights + (attention / 2 if causal else attention)


AnyShape = ModelShape | MLPShape


def _llama(layers: int, width: int, heads: int, inner: int) -> ModelShape:
    """Return a Llama 3: The Llama 3 Herd of Models, 2024, arXiv:2407.21783, table 3."""
    return ModelShape(
        layers, width, heads, 128_256, 8192, 8, None, inner, gated=True, tied=False, learns_bias=False
    )


def _megatron(layers: int, width: int, heads: int) -> ModelShape:
    """Return a GPT of Narayanan et al. 2021, arXiv:2104.04473, table 1: before fused attention."""
    return ModelShape(layers, width, heads, 51_200, 2048, positions=2048, dropout=True, fused_attention=False)


SHAPES = {
    "gpt-3-175b": ModelShape(96, 12_288, 96, 51_200, 2048, positions=2048),  # Brown et al. 2020, table 2.1
    "llama-3-8b": _llama(32, 4096, 32, 14_336),
    "llama-3-70b": _llama(80, 8192, 64, 28_672),
    "llama-3-405b": _llama(126, 16_384, 128, 53_248),
    # Jiang et al., "Mixtral of Experts", 2024, arXiv:2401.04088, table 1.
    "mixtral-8x7b": ModelShape(
        32, 4096, 32, 32_000, 8192, 8, None, 14_336, True, False, False, experts=8, active_experts=2
    ),
    "megatron-1.7b": _megatron(24, 2304, 24),
    "megatron-3.6b": _megatron(30, 3072, 32),
    "megatron-7.5b": _megatron(36, 4096, 32),
    "megatron-18.4b": _megatron(40, 6144, 48),
    "megatron-39.1b": _megatron(48, 8192, 64),
    "megatron-76.1b": _megatron(60, 10_240, 80),
    "megatron-145.6b": _megatron(80, 12_288, 96),
    "megatron-310.1b": _megatron(96, 16_384, 128),
    "megatron-529.6b": _megatron(105, 20_480, 128),
    "megatron-1008b": _megatron(128, 25_600, 160),
}


def shape_of(model: str, **changes: Any) -> AnyShape:
    """Return the shape of a named model, or the one that a file on disk describes, with some fields changed.

    WorkbookError if there is no such name or file, or if the file describes no decoder-only transformer.
    """
    from hybrid_parallel.shape_files import read_shape  # it uses this file

    if model in SHAPES:
        return replace(SHAPES[model], **changes)
    if model == "mlp":
        return replace(MLPShape(), **changes)
    if model in SIZES:
        return replace(workbook_shape(model), **changes)
    if Path(model).suffix in (".yaml", ".yml", ".json"):
        return replace(read_shape(Path(model)), **changes)
    raise WorkbookError(
        f"There is no model {model!r}: choose one of {', '.join([*SHAPES, *SIZES, 'mlp'])}, or give a .yaml "
        "file or a Hugging Face config.json."
    )


def workbook_shape(name: str) -> ModelShape:
    """Return the shape of one of this workbook's GPTs."""
    shape = shape_of_config(SIZES[name])
    assert isinstance(shape, ModelShape)
    return shape


def shape_of_config(config: GPTConfig | MLPConfig) -> AnyShape:
    """Return the shape of one of this workbook's models."""
    if isinstance(config, MLPConfig):
        return MLPShape(**vars(config))
    return ModelShape(
        config.num_layers,
        config.width,
        config.num_heads,
        config.vocab_size,
        config.block_size,
        config.kv_heads,
        tied=config.tied,
        positions=config.block_size,
        dropout=config.dropout > 0,
    )

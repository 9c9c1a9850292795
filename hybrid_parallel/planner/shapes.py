"""Describe a model by the numbers that decide its memory and its time.

    shape_of("llama-3-8b")             a name of SHAPES, or a model of this workbook (lab/models/model.py)
    shape_of("checkpoint/config.json") the configuration of a Hugging Face model on disk

A transformer's layer is attention and a feed-forward network, each with a norm before it. With d the model's
width, f the feed-forward width, q and k the widths of all query heads and of all key heads, v the vocabulary:

    attention        q d + 2 k d + d q             queries, keys and values, output
    feed-forward     2 f d, gated 3 f d            one for each expert, with d numbers of the router for each
    embeddings       v d, and v d for an untied head

Tensor parallelism divides some of a layer's numbers, and the others are on all its ranks: see `Numbers`.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from lab.launch.errors import WorkbookError, reason
from lab.models.model import SIZES, GPTConfig, MLPConfig


class Numbers(NamedTuple):
    """Counts numbers that tensor ranks divide among them, and those that each tensor rank has in full."""

    divided: float
    replicated: float

    def on_a_rank(self, tensor: int, divides_tokens: bool = False) -> float:
        """Return how many a tensor rank has. If the ranks divide tokens, nothing is replicated."""
        return self.divided / tensor + self.replicated / (tensor if divides_tokens else 1)


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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < (name == "positions") ^ 1:
                raise WorkbookError(f"{name} of a model is {value}; it must be at least 1.")
        if self.num_heads % self.kv_heads:
            raise WorkbookError(
                f"A model of {self.num_heads} query heads cannot have {self.kv_heads} key and value heads."
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
    def _feed_forward(self) -> Numbers:
        matrices = 3 if self.gated else 2
        bias = (matrices - 1) * self.inner_width if self.learns_bias else 0
        return Numbers(matrices * self.width * self.inner_width + bias, self.width * self.learns_bias)

    @property
    def expert_parameters(self) -> Numbers:
        """Return the parameters of all experts of a layer. The feed-forward of a dense model is no expert."""
        if self.experts == 1:
            return Numbers(0, 0)
        return Numbers(*(self.experts * number for number in self._feed_forward))

    @property
    def dense_parameters(self) -> Numbers:
        """Return the parameters of a layer without its experts."""
        projected = self.query_width + 2 * self.kv_width
        divided = self.width * (self.query_width + projected) + projected * self.learns_bias
        replicated = (5 if self.learns_bias else 2) * self.width  # two norms, the bias after attention
        if self.experts > 1:
            return Numbers(divided, replicated + self.width * self.experts)  # the router
        return Numbers(divided + self._feed_forward[0], replicated + self._feed_forward[1])

    @property
    def first_parameters(self) -> Numbers:
        """Return the parameters before the first layer: tokens and positions."""
        return Numbers(self.vocab_size * self.width, self.positions * self.width)

    @property
    def head_parameters(self) -> int:
        """Return the number of weights of the head, which are the embedding's if they are tied."""
        return self.vocab_size * self.width

    @property
    def num_parameters(self) -> float:
        """Return the number of all parameters; tied weights count once."""
        layers = self.num_layers * (sum(self.dense_parameters) + sum(self.expert_parameters))
        final_norm = (2 if self.learns_bias else 1) * self.width
        return layers + sum(self.first_parameters) + final_norm + (not self.tied) * self.head_parameters

    @property
    def active_weights(self) -> int:
        """Return the number of weights of a layer that one token is multiplied with."""
        attention = self.width * (2 * self.query_width + 2 * self.kv_width)
        expert = (3 if self.gated else 2) * self.width * self.inner_width
        router = self.width * self.experts if self.experts > 1 else 0
        return attention + self.active_experts * expert + router

    @property
    def column_weights(self) -> int:
        """Return the number of a layer's active weights that tensor parallelism divides by their outputs."""
        inner = self.active_experts * self.inner_width
        return self.width * (self.query_width + 2 * self.kv_width + inner)

    @property
    def end_weights(self) -> tuple[int, int]:
        """Return the numbers of weights, before and after the layers, that a token is multiplied with."""
        return 0, self.head_parameters

    @property
    def last_numbers(self) -> tuple[int, int]:
        """Return the numbers that the last stage holds for each token: of its norm, and the logits."""
        return 2 * self.width, self.vocab_size

    @property
    def reductions(self) -> float:
        """Return how often the tensor axis adds up a token's width: after attention and each expert."""
        return 1.0 + self.active_experts

    def kept_bytes(self, c: int) -> Numbers:
        """Return the bytes that a layer keeps of a token for its backward, with numbers of c bytes."""
        mask = 1 if self.dropout else 0
        # The inputs of both norms, their outputs, and the masks of both residual branches.
        replicated = 4 * self.width * c + 2 * self.width * mask
        divided = (2 * self.query_width + 2 * self.kv_width) * c  # queries, keys, values; attention's output
        # A feed-forward keeps what goes into and comes out of its activation; a gated one also the gate.
        divided += self.active_experts * (3 if self.gated else 2) * self.inner_width * c
        if self.experts > 1:  # what goes to each expert, what comes back, and that times its weight
            replicated += 3 * self.active_experts * self.width * c
        if not self.fused_attention:
            divided += self.num_heads * self.sequence_length * (2 * c + mask)
        return Numbers(divided, replicated)

    def moved_bytes(self, c: int) -> Numbers:
        """Return the bytes that a layer's forward reads and writes for a token outside of matrix products."""
        mask = 1 if self.dropout else 0
        # Two norms read and write; two residual branches read two numbers and write one, and a mask.
        replicated = (4 + 6) * self.width * c + 2 * self.width * mask
        divided = self.active_experts * (3 if self.gated else 2) * self.inner_width * c
        if self.experts > 1:  # copied when it is sent, multiplied by a weight, and added to the token
            replicated += (2 + 2 + 3) * self.active_experts * self.width * c
        if not self.positions:  # rotary embeddings read and write queries and keys
            divided += 2 * (self.query_width + self.kv_width) * c
        if not self.fused_attention:
            # Scores: written by one product; read and written by softmax and by dropout; read by the other.
            divided += self.num_heads * self.sequence_length * ((6 if mask else 4) * c + mask)
        return Numbers(divided, replicated)

    def flops_per_token(self, causal: bool = False) -> float:
        """Return the floating-point operations of a token in one step: a forward, and a backward twice it.

        6 for each active weight, and 12 s q for the attention of each layer to a sequence of s tokens, as in
        Chowdhery et al., "PaLM", 2022, arXiv:2204.02311, appendix B. `causal` leaves out the half of the
        attention that the mask removes.
        """
        weights = self.num_layers * self.active_weights + sum(self.end_weights)
        attention = 12.0 * self.num_layers * self.query_width * self.sequence_length
        return 6.0 * weights + (attention / 2 if causal else attention)


@dataclass(frozen=True)
class MLPShape(MLPConfig):
    """Describes an MLP by the numbers of a ModelShape. An example counts as one token.

    A layer is a linear layer and a ReLU, and all layers count as equal: what the first and the last one have
    less stands where a transformer has its embedding and its head, as a negative number. Two layers in a row
    share a reduction: the first one is divided by its outputs, the second by its inputs.
    """

    sequence_length: ClassVar[int] = 1
    kv_heads: ClassVar[int] = 1
    query_width: ClassVar[int] = 0  # an MLP has no attention
    kv_width: ClassVar[int] = 0
    experts: ClassVar[int] = 1
    active_experts: ClassVar[int] = 1
    tied: ClassVar[bool] = False
    fused_attention: ClassVar[bool] = True
    reductions: ClassVar[float] = 0.5
    expert_parameters: ClassVar[Numbers] = Numbers(0, 0)

    @property
    def dense_parameters(self) -> Numbers:
        """Return the parameters of a layer. Of two layers, the tensor axis does not divide one bias."""
        return Numbers(self.width**2 + self.width / 2, self.width / 2)

    @property
    def active_weights(self) -> int:
        """Return the number of weights of a layer that an example is multiplied with."""
        return self.width**2

    @property
    def column_weights(self) -> float:
        """Return the mean number of a layer's weights that are divided by their outputs."""
        return self.width**2 / 2

    @property
    def end_weights(self) -> tuple[int, int]:
        """Return by how much the first and the last layer have more weights than another one."""
        return (self.inputs - self.width) * self.width, (self.outputs - self.width) * self.width

    @property
    def first_parameters(self) -> Numbers:
        """Return by how much the first layer has more parameters than another one."""
        return Numbers(self.end_weights[0], 0)

    @property
    def head_parameters(self) -> int:
        """Return by how much the last layer has more parameters than another one."""
        return self.end_weights[1] + self.outputs - self.width

    @property
    def num_parameters(self) -> float:
        """Return the number of all parameters."""
        return self.num_layers * sum(self.dense_parameters) + self.end_weights[0] + self.head_parameters

    @property
    def last_numbers(self) -> tuple[int, int]:
        """Return the numbers that the last stage holds for each example, besides those of layers: outputs."""
        return 0, self.outputs

    def flops_per_token(self, causal: bool = False) -> float:
        """Return the floating-point operations of an example in one step: 6 for each weight."""
        return 6.0 * (self.num_layers * self.active_weights + sum(self.end_weights))

    def kept_bytes(self, c: int) -> Numbers:
        """Return the bytes of a layer's output. Those of every second layer are divided."""
        return Numbers(self.width * c / 2, self.width * c / 2)

    def moved_bytes(self, c: int) -> Numbers:
        """Return the bytes that the ReLU of a layer reads and writes for an example."""
        return Numbers(self.width * c, self.width * c)


AnyShape = ModelShape | MLPShape


def _llama(layers: int, width: int, heads: int, inner: int) -> ModelShape:
    """Return a Llama 3: The Llama 3 Herd of Models, 2024, arXiv:2407.21783, table 3."""
    return ModelShape(
        layers, width, heads, 128_256, 8192, 8, None, inner, gated=True, tied=False, learns_bias=False
    )


SHAPES = {
    "gpt-3-175b": ModelShape(96, 12_288, 96, 51_200, 2048, positions=2048),  # Brown et al. 2020, table 2.1
    "llama-3-8b": _llama(32, 4096, 32, 14_336),
    "llama-3-70b": _llama(80, 8192, 64, 28_672),
    "llama-3-405b": _llama(126, 16_384, 128, 53_248),
    # Jiang et al., "Mixtral of Experts", 2024, arXiv:2401.04088, table 1.
    "mixtral-8x7b": ModelShape(
        32, 4096, 32, 32_000, 8192, 8, None, 14_336, True, False, False, experts=8, active_experts=2
    ),
}


def shape_of(model: str, **changes: Any) -> AnyShape:
    """Return a named model's shape, or that of a config.json, with changes, or raise WorkbookError."""
    if model in SHAPES:
        return replace(SHAPES[model], **changes)
    if model == "mlp":
        return replace(MLPShape(), **changes)
    if model in SIZES:
        return replace(shape_of_config(SIZES[model]), **changes)
    if Path(model).suffix == ".json":
        return replace(read_shape(Path(model)), **changes)
    raise WorkbookError(
        f"There is no model {model!r}: choose one of {', '.join([*SHAPES, *SIZES, 'mlp'])}, or give a "
        "Hugging Face config.json."
    )


def shape_of_config(config: GPTConfig | MLPConfig, experts: int = 1, active_experts: int = 1) -> AnyShape:
    """Return the shape of a model of this workbook. Raise WorkbookError for experts that it cannot have."""
    if isinstance(config, MLPConfig):
        if experts > 1:
            raise WorkbookError(f"experts is {experts}, and an MLP has no blocks to put them in; take a gpt.")
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
        experts=experts,
        active_experts=active_experts,
    )


# Fields of ModelShape, with their names in the configurations of transformers' Llama and GPT-2.
NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size", "vocab_size"),
    "sequence_length": ("max_position_embeddings", "n_positions"),
    "feed_forward_width": ("intermediate_size", "n_inner"),
    "num_kv_heads": ("num_key_value_heads", ""),
    "head_width": ("head_dim", ""),
    "experts": ("num_local_experts", ""),
    "active_experts": ("num_experts_per_tok", ""),
}
REQUIRED = ("num_layers", "width", "num_heads", "vocab_size", "sequence_length")
KINDS = ("gpt2", "llama", "mistral", "qwen2", "mixtral")  # all but the first have Llama's names


def read_shape(path: Path) -> ModelShape:
    """Return the shape that a Hugging Face config.json describes; raise WorkbookError for another kind."""
    try:
        given = json.loads(path.read_text())
    except FileNotFoundError:
        raise WorkbookError(f"There is no file {path}.") from None
    except (OSError, ValueError) as error:
        raise WorkbookError(f"{path} cannot be read: {reason(error)}.") from None
    kind = given.get("model_type") if isinstance(given, dict) else None
    if kind not in KINDS:
        raise WorkbookError(
            f"{path} describes a model of type {kind!r}, which the planner does not know; known are "
            f"{', '.join(KINDS)}."
        )
    sizes: dict[str, Any] = {}
    old = kind == "gpt2"
    for name, names in NAMES.items():
        theirs = names[old]
        value = given.get(theirs)
        if type(value) is int:
            sizes[name] = value
        elif value is not None or name in REQUIRED:
            raise WorkbookError(f"{path}: {theirs} is {value!r}; it must be an integer.")
    tied = bool(given.get("tie_word_embeddings", old))
    positions = sizes["sequence_length"] if old else 0
    try:
        return ModelShape(
            **sizes, gated=not old, tied=tied, learns_bias=old, positions=positions, dropout=old
        )
    except WorkbookError as error:
        raise WorkbookError(f"{path}: {error}") from None

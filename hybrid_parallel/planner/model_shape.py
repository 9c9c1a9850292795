"""Describe a transformer by the numbers that decide its memory and time: layers, widths, heads, vocabulary.

A layer is attention and a feed-forward network, each with a norm before it. Shapes by name: d model width,
f feed-forward width, q and k the widths of all query heads and of all key heads together, v vocabulary.

    attention        q d + 2 k d + d q             queries, keys and values, output
    feed-forward     2 f d, gated 3 f d            one for each expert, with d numbers of the router for each
    embeddings       v d, and v d for an untied head
"""

from dataclasses import dataclass
from typing import ClassVar

from lab.launch.errors import WorkbookError


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

        These are its norms, its router, and the biases of linear layers that are divided by their inputs.
        """
        return (4 + 1 + self.experts if self.learns_bias else 2) * self.width + self.router_weights

    @property
    def expert_parameters(self) -> tuple[int, int]:
        """Return the number of parameters of a layer's experts, and how many of them are not divided.

        Those are not divided by tensor parallelism. The feed-forward of a dense model is no expert.
        """
        if self.experts == 1:
            return 0, 0
        biases = (2 if self.gated else 1) * self.inner_width + self.width if self.learns_bias else 0
        replicated = self.width if self.learns_bias else 0
        return self.experts * (self.expert_weights + biases), self.experts * replicated

    def held_weights(self, expert_ranks: int) -> float:
        """Return the number of weights of a layer on a rank that has an n-th of its experts."""
        experts = self.experts / expert_ranks * self.expert_weights
        return self.attention_weights + self.router_weights + experts

    @property
    def reductions(self) -> float:
        """Return how often the tensor axis adds up the width of a token in the forward of a layer.

        It does so after attention, and after each expert that the token has passed.
        """
        return 1.0 + self.active_experts

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
        inner = self.active_experts * self.inner_width
        return self.width * (self.query_width + 2 * self.kv_width + inner)

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
        if self.experts > 1:  # what goes to each expert, what comes back, and that times its weight
            replicated += 3 * self.active_experts * self.width * c
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
        if self.experts > 1:  # copied when it is sent, multiplied by a weight, and added to the token
            replicated += (2 + 2 + 3) * self.active_experts * self.width * c
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

"""Describe an MLP by the numbers of a ModelShape (model_shape.py), so that the planner can plan it, too.

A layer is a linear layer and a ReLU, and an example counts as one token. The planner takes all layers for
equal. So what the first and the last one have less stands where a transformer has its embedding and its head,
as a negative number. Two layers in a row share a reduction: the first one is divided by its outputs, the
second by its inputs (tensor_parallel/parallelize.py).
"""

from dataclasses import dataclass
from typing import ClassVar

from lab.models.model import MLPConfig


@dataclass(frozen=True)
class MLPShape(MLPConfig):
    """Holds the sizes of an MLP, of which each layer but the first and the last one has `width` * `width`."""

    sequence_length: ClassVar[int] = 1
    kv_heads: ClassVar[int] = 1
    query_width: ClassVar[int] = 0  # an MLP has no attention
    kv_width: ClassVar[int] = 0
    positions: ClassVar[int] = 0
    experts: ClassVar[int] = 1
    active_experts: ClassVar[int] = 1
    expert_parameters: ClassVar[tuple[int, int]] = (0, 0)
    tied: ClassVar[bool] = False
    fused_attention: ClassVar[bool] = True
    reductions: ClassVar[float] = 0.5
    deferred_share: ClassVar[float] = 2.0
    kept_messages: ClassVar[int] = 1  # for the backward of each microbatch: `kept_bytes` counts outputs alone

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer."""
        return self.width * self.width + self.width

    @property
    def replicated_parameters(self) -> float:
        """Return the mean number of a layer's parameters that tensor parallelism does not divide: biases."""
        return self.width / 2

    @property
    def active_weights(self) -> int:
        """Return the number of weights of a layer that an example is multiplied with."""
        return self.width * self.width

    def held_weights(self, _: int) -> float:
        """Return the number of weights of a layer; there are no experts to divide."""
        return self.active_weights

    @property
    def column_weights(self) -> float:
        """Return the mean number of a layer's weights that are divided by their outputs."""
        return self.active_weights / 2

    @property
    def token_parameters(self) -> int:
        """Return by how much the first layer has more parameters than another one: less than 0."""
        return (self.inputs - self.width) * self.width

    @property
    def head_parameters(self) -> int:
        """Return by how much the last layer has more parameters than another one: less than 0."""
        return (self.outputs - self.width) * (self.width + 1)

    @property
    def end_weights(self) -> tuple[int, int]:
        """Return by how much the first and the last layer have more weights than another one."""
        return (self.inputs - self.width) * self.width, (self.outputs - self.width) * self.width

    @property
    def last_numbers(self) -> tuple[int, int]:
        """Return the numbers that the last stage holds for each example, besides those of layers: outputs."""
        return 0, self.outputs

    @property
    def num_parameters(self) -> int:
        """Return the number of all parameters."""
        return self.num_layers * self.layer_parameters + self.token_parameters + self.head_parameters

    def flops_per_token(self, causal: bool = False) -> float:
        """Return the floating-point operations of an example in one step: 6 for each weight."""
        return 6.0 * (self.num_layers * self.active_weights + sum(self.end_weights))

    def kept_bytes(self, c: int) -> tuple[float, float]:
        """Return the bytes that a layer keeps of an example, with numbers of c bytes: replicated, divided.

        These are its outputs. Those of every second layer are divided among tensor ranks.
        """
        return self.width * c / 2, self.width * c / 2

    def moved_bytes(self, c: int) -> tuple[float, float]:
        """Return the bytes that the ReLU of a layer reads and writes for an example: replicated, divided."""
        return self.width * c, self.width * c

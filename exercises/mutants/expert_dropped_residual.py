"""With a capacity the loss stays high: a token that every expert has dropped leaves the block as zeros."""

from torch import Tensor

TARGET = "lab.models.model.Block.forward"
KILLER = (
    "tests.expert_parallel.test_equivalence."
    "test_a_token_that_no_expert_takes_leaves_the_block_with_its_residual"
)
CAUSE = "does its residual reach the output"
SYMPTOM = "With a capacity the loss stays higher than the dropped tokens explain."


def mutant(self, x_btd: Tensor) -> Tensor:
    x_btd = x_btd + self.dropout(self.attention(self.attention_norm(x_btd)))
    y_btd = self.dropout(self.mlp(self.mlp_norm(x_btd)))
    return (x_btd + y_btd) * (y_btd != 0).any(-1, keepdim=True)

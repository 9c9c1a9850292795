"""The loss falls, and the router stays as it was made: it gets no gradient of the loss."""

from torch import Tensor

TARGET = "expert_parallel.train_moe.Router.forward"
KILLER = "tests.expert_parallel.test_equivalence.test_two_ranks_have_the_gradients_of_one_process"
CAUSE = "Only zeros arrive at `blocks.0.mlp.router.weight`"
SYMPTOM = "The loss falls, and a few experts get nearly all tokens from the first step to the last."


def mutant(self, x_td: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    probabilities_tE = (x_td @ self.weight.T).softmax(-1)
    experts_tk = (probabilities_tE.detach() + self.bias_E).topk(self.top_k).indices
    return probabilities_tE, probabilities_tE.detach().gather(1, experts_tk), experts_tk

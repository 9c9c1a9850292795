"""With one expert for each token all is right; with two, tokens get what experts made of other tokens."""

from torch import Tensor

TARGET = "expert_parallel.train_moe.MixtureOfExperts.combine"
KILLER = "tests.expert_parallel.test_layer.test_tokens_reach_their_experts_and_come_home_in_order"
CAUSE = "added to the token that it was made of"
SYMPTOM = "With top-k 1 training equals one process, and with top-k 2 it does not."


def mutant(self, y_td: Tensor, y_ad: Tensor, weights_tk: Tensor, assignments: Tensor) -> Tensor:
    weights_a = weights_tk.flatten()[assignments]
    terms_ad = (y_ad * weights_a.unsqueeze(1)).to(y_td.dtype)
    return y_td.index_add(0, assignments % len(y_td), terms_ad)

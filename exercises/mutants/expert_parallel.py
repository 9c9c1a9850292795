"""Wrong implementations of experts."""

import torch.distributed as dist
from torch import Tensor

from exercises.mutants import mutant


@mutant(
    target="expert_parallel.balancing.auxiliary_loss",
    killer="tests.expert_parallel.test_equivalence.test_the_auxiliary_loss_counts_the_tokens_of_all_ranks",
    symptom="With a balancing loss, training depends on the number of ranks.",
)
def expert_balance_of_one_rank(probabilities_tE: Tensor, chosen_rE: Tensor) -> Tensor:
    """Experts are balanced on each rank, and not over the batch: the loss depends on the number of ranks."""
    chosen_E = chosen_rE[dist.get_rank()]
    f_E = chosen_E.to(probabilities_tE.dtype) / chosen_E.sum()
    return len(f_E) * (f_E * probabilities_tE.mean(0)).sum()


@mutant(
    target="expert_parallel.train_moe.MixtureOfExperts.combine",
    killer="tests.expert_parallel.test_layer.test_tokens_reach_their_experts_and_come_home_in_order",
    symptom="With top-k 1 training equals one process, and with top-k 2 it does not.",
)
def expert_outputs_of_other_tokens(
    self, y_td: Tensor, y_ad: Tensor, weights_tk: Tensor, assignments: Tensor
) -> Tensor:
    """With one expert for each token all is right; with two, tokens get what experts made of other tokens."""
    weights_a = weights_tk.flatten()[assignments]
    terms_ad = (y_ad * weights_a.unsqueeze(1)).to(y_td.dtype)
    return y_td.index_add(0, assignments % len(y_td), terms_ad)


@mutant(
    target="expert_parallel.train_moe.Router.forward",
    killer="tests.expert_parallel.test_equivalence.test_two_ranks_have_the_gradients_of_one_process",
    cause="Only zeros arrive at `blocks.0.mlp.router.weight`",
    symptom="The loss falls, and a few experts get nearly all tokens from the first step to the last.",
)
def expert_weights_detached(self, x_td: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss falls, and the router stays as it was made: it gets no gradient of the loss."""
    probabilities_tE = (x_td @ self.weight.T).softmax(-1)
    experts_tk = (probabilities_tE.detach() + self.bias_E).topk(self.top_k).indices
    return probabilities_tE, probabilities_tE.detach().gather(1, experts_tk), experts_tk


@mutant(
    target="expert_parallel.train_moe.ExpertParallel.finish_gradient_sync",
    killer="tests.expert_parallel.test_equivalence.test_an_expert_is_averaged_over_its_replicas_only",
    symptom="With a copy of each expert on one rank in two, the loss falls more slowly than on one process.",
)
def experts_averaged_over_all_ranks(self) -> None:
    """The loss falls, and an expert learns from the gradients of other experts, which lie on the other
    ranks.
    """
    from expert_parallel.train_moe import average_gradients

    average_gradients([*self.dense, *self.experts], self.groups.everyone)
    for parameter in self.experts:
        if parameter.requires_grad:
            parameter.grad /= self.groups.num_expert_ranks


@mutant(
    target="expert_parallel.train_moe.ExpertParallel.finish_gradient_sync",
    killer="tests.expert_parallel.test_equivalence.test_two_ranks_have_the_gradients_of_one_process",
    cause="sum over ranks that should be a mean",
    symptom="With SGD experts diverge when many ranks share them, and with Adam the loss looks normal.",
)
def experts_not_scaled(self) -> None:
    """Experts learn faster than all else: the more ranks share them, the larger are their gradients."""
    from expert_parallel.train_moe import average_gradients

    average_gradients(self.dense, self.groups.everyone)
    average_gradients(self.experts, self.groups.replicas)


@mutant(
    target="lab.models.model.Block.forward",
    killer=(
        "tests.expert_parallel.test_equivalence."
        "test_a_token_that_no_expert_takes_leaves_the_block_with_its_residual"
    ),
    symptom="With a capacity the loss stays higher than the dropped tokens explain.",
)
def expert_dropped_residual(self, x_btd: Tensor) -> Tensor:
    """With a capacity the loss stays high: a token that every expert has dropped leaves the block as
    zeros.
    """
    x_btd = x_btd + self.dropout(self.attention(self.attention_norm(x_btd)))
    y_btd = self.dropout(self.mlp(self.mlp_norm(x_btd)))
    return (x_btd + y_btd) * (y_btd != 0).any(-1, keepdim=True)

"""Wrong implementations of experts."""

from exercises.mutants import mutant

EQUIVALENCE = "tests/expert_parallel/test_equivalence.py::"
LAYER = "tests/expert_parallel/test_layer.py::"

mutant(
    "expert_balance_of_one_rank",
    "Experts are balanced on each rank, and not over the batch: the loss depends on the number of ranks.",
    target="expert_parallel.balancing.auxiliary_loss",
    changes={
        "chosen_rE.sum(0).to(probabilities_tE.dtype) / chosen_rE.sum()": (
            "chosen_rE[torch.distributed.get_rank()].to(probabilities_tE.dtype)"
            " / chosen_rE[torch.distributed.get_rank()].sum()"
        ),
    },
    killer=EQUIVALENCE + "test_experts_train_as_one_process_with[an auxiliary loss of all ranks]",
    symptom="With a balancing loss, training depends on the number of ranks.",
)

mutant(
    "expert_bias_in_16_bits",
    "In bfloat16 experts stay unbalanced: the bias is cast, and its small steps are rounded to nothing.",
    target="expert_parallel.train_moe.Router._apply",
    changes={"if self.bias_E.itemsize < before.itemsize:": "if False:"},
    killer=EQUIVALENCE + "test_a_bias_moves_also_where_the_model_has_16_bits",
)

mutant(
    "expert_bias_of_the_last_microbatch",
    "Experts stay unbalanced with several microbatches: a bias moves by the last one's choices only.",
    target="expert_parallel.train_moe.ExpertParallel.move_biases",
    changes={
        "move_bias(layer.router.bias_E, layer.counts_rE, rate)": (
            "move_bias(layer.router.bias_E, layer.chosen_rE, rate)"
        )
    },
    killer=EQUIVALENCE + "test_a_bias_moves_by_the_choices_of_all_microbatches_of_a_step",
)

mutant(
    "expert_choices_counted_again",
    "The bias moves another way if blocks are recomputed: their choices count a second time in the backward.",
    target="expert_parallel.train_moe.MixtureOfExperts.forward",
    changes={"if not is_in_backward():": "if self.training:"},
    killer=EQUIVALENCE + "test_choices_that_are_computed_again_for_the_backward_count_once",
)

mutant(
    "expert_outputs_of_other_tokens",
    "With one expert for each token all is right; with two, tokens get what experts made of other tokens.",
    target="expert_parallel.train_moe.MixtureOfExperts.combine",
    changes={"places.view(*weights_tk.shape, -1).sum(1)": "places.view(*weights_tk.T.shape, -1).sum(0)"},
    killer=LAYER + "test_tokens_reach_their_experts_and_come_home_in_order",
    symptom="With top-k 1 training equals one process, and with top-k 2 it does not.",
)

mutant(
    "expert_weights_detached",
    "The loss falls, and the router stays as it was made: it gets no gradient of the loss.",
    target="expert_parallel.train_moe.Router.forward",
    changes={"probabilities_tE.gather(1": "probabilities_tE.detach().gather(1"},
    killer=EQUIVALENCE + "test_experts_train_as_one_process_with[two ranks]",
    symptom="The loss falls, and a few experts get nearly all tokens from the first step to the last.",
)

mutant(
    "experts_averaged_over_all_ranks",
    "The loss falls, and an expert learns from the gradients of other experts, which lie on the other ranks.",
    target="expert_parallel.train_moe.ExpertParallel.finish_gradient_sync",
    changes={"self.groups.replicas": "self.groups.everyone"},
    killer=EQUIVALENCE + "test_experts_train_as_one_process_with[replicas of some experts]",
    symptom="With a copy of each expert on one rank in two, the loss falls more slowly than on one process.",
)

mutant(
    "experts_not_scaled",
    "Experts learn faster than all else: the more ranks share them, the larger are their gradients.",
    target="expert_parallel.train_moe.ExpertParallel.finish_gradient_sync",
    changes={
        (
            "for parameter in self.experts:\n"
            "    if parameter.requires_grad:\n"
            "        parameter.grad /= self.groups.num_expert_ranks"
        ): "",
    },
    killer=EQUIVALENCE + "test_experts_train_as_one_process_with[two ranks]",
    cause="sum over ranks that should be a mean",
    symptom="With SGD experts diverge when many ranks share them, and with Adam the loss looks normal.",
)

mutant(
    "expert_dropped_residual",
    "With a capacity the loss stays high: a token that every expert has dropped leaves the block as zeros.",
    target="lab.models.model.Block.forward",
    changes={
        "return x_btd + self.dropout(self.mlp(self.mlp_norm(x_btd)))": (
            "y_btd = self.dropout(self.mlp(self.mlp_norm(x_btd)))\n"
            "return (x_btd + y_btd) * (y_btd != 0).any(-1, keepdim=True)"
        ),
    },
    killer=EQUIVALENCE + "test_experts_train_as_one_process_with[a capacity]",
    symptom="With a capacity the loss stays higher than the dropped tokens explain.",
)

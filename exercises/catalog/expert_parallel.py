"""Exercises of lesson 7: experts on different ranks."""

from exercises.catalog.exercise import Exercise

LAYER = "tests/expert_parallel/test_layer.py::"
EQUAL = "tests/expert_parallel/test_equivalence.py::"

EXERCISES = (
    Exercise(
        name="dispatch_and_combine",
        title="To the experts and back",
        notebook="12_many_experts",
        target="expert_parallel.train_moe.MixtureOfExperts.in_order_of_expert",
        also=("expert_parallel.train_moe.MixtureOfExperts.combine",),
        tests=(
            LAYER + "test_tokens_reach_their_experts_and_come_home_in_order",
            LAYER + "test_the_first_tokens_are_kept_where_the_capacity_ends",
            EQUAL + "test_experts_train_as_one_process_with[two ranks]",
            EQUAL + "test_experts_train_as_one_process_with[a capacity]",
        ),
        difficulty=3,
        minutes=35,
        doc="""
            Return the assignments that are sent, as numbers: i is of token i // k and its choice number i %
            k.

            `experts_tk` has the k experts that each of this rank's tokens has chosen. `chosen_E` counts how
            many assignments each expert has, and `sent_E` how many of them the capacity lets through. The
            result begins with those of expert 0, then come those of expert 1, and so on. For each expert
            they are in the order of the tokens, and the last ones are dropped.
        """,
        docs={
            "combine": """
                Add to each token of `y_td` what its experts have made of it, times their weights.

                `y_ad` has what came back, one row for each assignment, in the order of `assignments`.
                `weights_tk` has the weight of each choice of each token. A dropped token gets nothing.
            """,
        },
        helps=("self.moe.top_k: int\n    The number k of choices of a token.",),
        hints=(
            "Each token has k numbers in experts_tk. Flattened, number i belongs to token i // k. Sort "
            "these positions by the expert that stands there. What keeps the tokens of one expert in order?",
            "experts_tk.flatten().argsort(stable=True) has the positions in order of expert. The first "
            "chosen_E[0] of them are of expert 0, and of these the first sent_E[0] are sent.",
            "Split by chosen_E.tolist(), cut each part to its number of sent_E.tolist(), and join the "
            "parts. In combine a row belongs to token assignments // k, and its weight is "
            "weights_tk.flatten()[assignments]. A token has up to k rows, so add with index_add: an "
            "assignment keeps only one.",
        ),
    ),
    Exercise(
        name="expert_gradients",
        title="Whose gradient is a mean of what",
        notebook="12_many_experts",
        target="expert_parallel.train_moe.ExpertParallel.finish_gradient_sync",
        tests=(
            EQUAL + "test_experts_train_as_one_process_with[two ranks]",
            EQUAL + "test_experts_train_as_one_process_with[replicas of some experts]",
            EQUAL + "test_experts_train_as_one_process_with[replicas of all experts]",
        ),
        difficulty=3,
        minutes=25,
        needs=("dispatch_and_combine",),
        doc="""
            Give each parameter the gradient that one process has for the batch of all ranks.

            Each rank's loss is the mean over its own tokens. Frozen parameters have no gradient.
        """,
        helps=(
            "self.dense: list[nn.Parameter], self.experts: list[nn.Parameter]\n    "
            "What every rank holds, and what this rank's experts have.",
            "self.groups.everyone, self.groups.experts, self.groups.replicas: Group\n    "
            "All ranks; those that share the experts; those that hold the same ones.",
            "self.groups.num_expert_ranks: int",
        ),
        hints=(
            "The loss of one process is the mean of the ranks' losses. So the gradient of what all ranks "
            "hold is the mean over ranks. Which ranks' tokens has an expert already seen in this backward?",
            "The backward of dispatch brings an expert the gradients of the tokens of all ranks of its "
            "expert group, and they add up. The gradient is a sum where it should be a mean.",
            "Average self.dense over everyone. Average self.experts over replicas, which have seen the "
            "tokens of other expert groups, and divide what has a gradient by num_expert_ranks.",
        ),
    ),
    Exercise(
        name="open_moe",
        title="A mixture of experts from nothing",
        notebook="12_many_experts",
        target="expert_parallel.train_moe.MixtureOfExperts.forward",
        tests=(
            LAYER + "test_tokens_reach_their_experts_and_come_home_in_order",
            LAYER + "test_a_token_travels_only_to_its_experts",
            LAYER + "test_a_rank_sends_nothing_to_others",
        ),
        difficulty=4,
        minutes=75,
        needs=("dispatch_and_combine",),
        helps=(
            "self.router(x) -> (probabilities, weights, experts)\n    Of tokens (t, d): (t, E), and of the k "
            "choices of each token their weights and experts, (t, k).",
            "self.experts: nn.ModuleDict\n    This rank's experts, by their numbers as text.",
            "self.moe.num_experts: int",
            "self.groups.experts: Group\n    Each of its n ranks has E/n experts.",
        ),
        stub='''
            import torch
            import torch.distributed as dist

            from comm.collectives import all_gather, all_to_all
            from comm.functions import exchange_shards


            def forward(self, x_btd):
                """Return for each token the weighted sum of what its k experts make of it, in x's shape.

                The experts lie on the ranks in order: rank 0 has the first E/n of them. A token travels only
                to ranks that have an expert of its choice, and its results come back. The result can be
                differentiated with respect to x and the experts' parameters, whose gradients then have the
                terms of all ranks' tokens. No token is dropped.
                """
                raise NotImplementedError
        ''',
        hints=(
            "Before tokens can travel, each rank has to know how many it will get from each other rank, and "
            "for which of its experts.",
            "Sort the t k choices by expert: then what goes to one rank is one piece, and within it what "
            "goes to one expert. exchange_shards(x, 0, group, sent, received) moves rows, also in the "
            "backward.",
            "all_to_all of the counts for each expert tells how many arrive. What arrives is in the order of "
            "ranks, and from each in the order of experts; the results must go back in the same order. Every "
            "rank must call the same exchanges, also one without tokens.",
        ),
    ),
    Exercise(
        name="balance_experts",
        title="Keep all experts busy",
        notebook="12_many_experts",
        target="expert_parallel.balancing.auxiliary_loss",
        also=("expert_parallel.balancing.move_bias",),
        tests=(
            EQUAL + "test_experts_train_as_one_process_with[an auxiliary loss of all ranks]",
            EQUAL + "test_experts_train_as_one_process_with[a bias by the counts of all ranks]",
        ),
        difficulty=2,
        minutes=20,
        doc="""
            Return this rank's term of the balancing loss, E * sum over e of f_e P_e.

            `probabilities_tE` are the router's probabilities of this rank's tokens, and P_e is their mean
            for expert e. `chosen_rE` counts for each rank how many of its tokens have chosen each expert,
            and f_e is the share of all choices of all ranks that fell on expert e. The mean of the terms
            over ranks is the loss of one process.
        """,
        docs={
            "move_bias": """
                Raise the bias of experts that got fewer tokens than the mean, and lower it where there were
                more.

                Change `bias_E` in place, by `rate`. The counts are those of all ranks, so that the bias
                stays equal on all ranks.
            """,
        },
        hints=(
            "Counts are integers and have no gradient; the probabilities have one. Each rank has only its "
            "own probabilities, but the counts of all ranks.",
            "f is chosen_rE.sum(0) / chosen_rE.sum(), in the dtype of the probabilities, and P is "
            "probabilities_tE.mean(0). There are len(f) experts.",
            "For the bias: counts = chosen_rE.sum(0) in the bias's dtype, and bias_E += rate * "
            "(counts.mean() - counts).sign(). The function must not be recorded by autograd: "
            "torch.no_grad().",
        ),
    ),
)

"""To the experts and back. Write `MixtureOfExperts.in_order_of_expert` and `MixtureOfExperts.combine` of
expert_parallel/train_moe.py.

Read notebooks/12_many_experts.ipynb first. Do not open expert_parallel/train_moe.py yet: it has the
solution.

Check it with `python -m exercises check dispatch_and_combine`.
"""

import torch
from torch import Tensor


def in_order_of_expert(self, experts_tk: Tensor, chosen_E: Tensor, sent_E: Tensor) -> Tensor:
    """Return the assignments that are sent, as numbers: i is of token i // k and its choice number i %
    k.

    `experts_tk` has the k experts that each of this rank's tokens has chosen. `chosen_E` counts how
    many assignments each expert has, and `sent_E` how many of them the capacity lets through. The
    result begins with those of expert 0, then come those of expert 1, and so on. For each expert
    they are in the order of the tokens, and the last ones are dropped.
    """
    raise NotImplementedError("`MixtureOfExperts.in_order_of_expert` is not written yet.")


def combine(self, y_td: Tensor, y_ad: Tensor, weights_tk: Tensor, assignments: Tensor) -> Tensor:
    """Add to each token of `y_td` what its experts have made of it, times their weights.

    `y_ad` has what came back, one row for each assignment, in the order of `assignments`.
    `weights_tk` has the weight of each choice of each token. `self.moe.top_k` is k. A dropped
    token gets nothing.
    """
    raise NotImplementedError("`MixtureOfExperts.combine` is not written yet.")

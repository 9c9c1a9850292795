"""Keep all experts busy. Write `auxiliary_loss` and `move_bias` of expert_parallel/balancing.py.

Read notebooks/12_many_experts.ipynb first. Do not open expert_parallel/balancing.py yet: it has the
solution.

Check it with `python -m exercises check balance_experts`.
"""

from torch import Tensor


def auxiliary_loss(probabilities_tE: Tensor, chosen_rE: Tensor) -> Tensor:
    """Return this rank's term of the balancing loss, E * sum over e of f_e P_e.

    `probabilities_tE` are the router's probabilities of this rank's tokens, and P_e is their mean
    for expert e. `chosen_rE` counts for each rank how many of its tokens have chosen each expert,
    and f_e is the share of all choices of all ranks that fell on expert e. The mean of the terms
    over ranks is the loss of one process.
    """
    raise NotImplementedError("`auxiliary_loss` is not written yet.")


def move_bias(bias_E: Tensor, chosen_rE: Tensor, rate: float) -> None:
    """Raise the bias of experts that got fewer tokens than the mean, and lower it where there were
    more.

    Change `bias_E` in place, by `rate`. The counts are those of all ranks, so that the bias
    stays equal on all ranks.
    """
    raise NotImplementedError("`move_bias` is not written yet.")

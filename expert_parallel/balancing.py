"""Keep all experts busy: by a term of the loss, or by a bias that steers the router's choice.

An expert that gets more tokens learns more, so it gets still more tokens, and the others are never trained.
Two ways against this, for E experts, T tokens and k experts for each token, where c_e tokens have chosen
expert e:

      auxiliary loss   E * sum over e of f_e P_e     f_e = c_e / (k T), P_e = mean probability of expert e
      bias             b_e += rate * sign(mean of c - c_e), and the choice is the top k of p + b

The loss is 1 if all experts are chosen equally (Fedus, Zoph and Shazeer, "Switch Transformers", 2021,
https://arxiv.org/abs/2101.03961, equations 4 to 6, for k = 1). Counts have no gradient, so it flows through
P_e only. The bias adds no term to any gradient, and a chosen expert's output is still multiplied by p
(DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, https://arxiv.org/abs/2412.19437, section 2.1.2).

Both take the counts of all ranks. If each rank multiplies P of its own tokens by f of the *global* batch, the
mean over ranks is the loss of one process, if all ranks have equally many tokens. With f of its own tokens it
would be another number.
"""

import torch
from torch import Tensor


def auxiliary_loss(probabilities_tE: Tensor, chosen_rE: Tensor) -> Tensor:
    """Return this rank's term; `chosen_rE` counts for each rank how many of its tokens chose each expert."""
    f_E = chosen_rE.sum(0).to(probabilities_tE.dtype) / chosen_rE.sum()
    f_E = f_E.to(probabilities_tE.device, non_blocking=True)
    return len(f_E) * (f_E * probabilities_tE.mean(0)).sum()


@torch.no_grad()
def move_bias(bias_E: Tensor, chosen_rE: Tensor, rate: float) -> None:
    """Raise the bias of experts that got fewer tokens than the mean, and lower it where there were more."""
    chosen_E = chosen_rE.sum(0).to(bias_E, non_blocking=True)
    bias_E += rate * (chosen_E.mean() - chosen_E).sign()

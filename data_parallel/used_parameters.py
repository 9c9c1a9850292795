"""Which parameters any rank used in a step, told in numbers that travel at the end of the last bucket.

      last bucket   | gradient 2 | gradient 1 | gradient 0 | 1 0 1 |      one number for each parameter

A branch of the model may be used on some ranks only. Its parameters then count as zero on the others. A
parameter that no rank used must have no gradient afterwards, as on one process: zeros would let weight decay
shrink it. No rank can know that alone, so the ranks tell each other, in no message of its own.
"""

import torch
from torch import Tensor, nn


def note_used(parameters: list[nn.Parameter], flags: Tensor) -> None:
    """Write to `flags`, before they are reduced, which parameters have a gradient on this rank."""
    flags.copy_(torch.tensor([float(parameter.grad is not None) for parameter in parameters]))


def used_on_any_rank(parameters: list[nn.Parameter], flags: Tensor) -> set[Tensor]:
    """Return the parameters that any rank used, from the reduced `flags`."""
    return {parameter for parameter, flag in zip(parameters, flags.tolist(), strict=True) if flag}

"""Let all ranks know which parameters any rank used, by flags that travel at the end of the last bucket.

      last bucket   | gradient 2 | gradient 1 | gradient 0 | 1 0 1 |      one number for each parameter

A branch of the model may be used on some ranks only. The other ranks then contribute zeros to its
gradients. A parameter that no rank used must have no gradient afterwards, as on one process: with a
gradient of zeros, weight decay would shrink it. One rank cannot know what the others used. So the flags are
reduced with the last bucket, which saves a message.
"""

from torch import Tensor, nn


def note_used(parameters: list[nn.Parameter], flags: Tensor) -> None:
    """Write to `flags`, before they are reduced, which parameters have a gradient on this rank."""
    # Fills, and no copy from the host: on a GPU such a copy would wait for all of the backward.
    flags.fill_(1.0)
    for i, parameter in enumerate(parameters):
        if parameter.grad is None:
            flags[i].zero_()


def used_on_any_rank(parameters: list[nn.Parameter], flags: Tensor) -> set[Tensor]:
    """Return the parameters that any rank used, from the reduced `flags`."""
    return {parameter for parameter, flag in zip(parameters, flags.tolist(), strict=True) if flag}

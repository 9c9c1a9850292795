"""Complete the gradients of a tensor parallel model that ZeRO has cut into pieces along another axis.

      tensor rank 0   term of a norm's gradient ─► ZeRO ─► a piece of it ─┐
      tensor rank 1   term of a norm's gradient ─► ZeRO ─► a piece of it ─┴─ sum over the tensor axis

ZeRO takes a gradient out of the model as soon as a backward has computed it, so only pieces of the terms are
left to add up. The ranks of a tensor group hold parameters of equal shapes, so they have equal pieces.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from comm.chosen_pattern import chosen_pattern
from comm.collectives import all_reduce
from tensor_parallel.parallel_model import TensorParallel


class TermsInPieces:
    """Does for pieces of gradients what TensorParallel.finish_gradient_sync does for full gradients.

    `pieces` has, for each parameter that is trained, this rank's piece. Call `zero_grad()` before each
    backward.
    """

    def __init__(self, tensor: TensorParallel, pieces: Mapping[nn.Parameter, nn.Parameter]) -> None:
        self._group, self._pattern = tensor.group, chosen_pattern("all_reduce", tensor.group)
        self._pieces = [pieces[p] for p in tensor._with_own_tokens_only() if p in pieces]

    def finish_gradient_sync(self) -> None:
        """Add up the gradients of which each rank has one term, with one all-reduce."""
        gradients = [piece.grad for piece in self._pieces]
        terms = [gradient.as_subclass(Tensor) for gradient in gradients if gradient is not None]
        if terms:
            total = torch.cat(terms)
            all_reduce(total, group=self._group, pattern=self._pattern)
            torch._foreach_copy_(terms, list(total.split([term.numel() for term in terms])))

"""The norm of gradients that several ranks have, counted on each."""

import torch
from torch import Tensor


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squared magnitudes, in float64, also of a sparse or a complex gradient."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values.double().square().sum()

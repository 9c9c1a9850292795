"""Gradients of one rank's tokens. Write `TensorParallel.with_own_tokens_only` and
`TensorParallel.finish_gradient_sync` of tensor_parallel/parallelize.py.

Read notebooks/07_tensor_and_sequence_parallel.ipynb first. Do not open tensor_parallel/parallelize.py yet:
it has the solution.

You may use:

    average_gradients(parameters: Iterable[nn.Parameter], group: Group = None) -> None
        Replace each gradient by the mean over the group.
    self.sequence_parallel: bool

Check it with `python -m exercises check sequence_parallel`.
"""

from torch import nn

from training.gradients import average_gradients


def with_own_tokens_only(self) -> list[nn.Parameter]:
    """Return the parameters whose gradient on this rank comes from this rank's tokens only.

    `self.dims` has the names of the parameters that are divided among the ranks. `self.module` names
    its parameters as they are in `self.dims`.
    """
    raise NotImplementedError("`TensorParallel.with_own_tokens_only` is not written yet.")


def finish_gradient_sync(self) -> None:
    """Add up the gradients of which each rank has one term; complete ones stay as they are.

    A hook has multiplied each term by the number of ranks. `average_gradients(parameters,
    self.group)` replaces gradients by their mean over the ranks, in one message. Where
    `self.held` is not None, it has this rank's shard of each parameter that ZeRO has divided
    along another axis: average the gradients of these. It lacks parameters that are frozen.
    """
    raise NotImplementedError("`TensorParallel.finish_gradient_sync` is not written yet.")

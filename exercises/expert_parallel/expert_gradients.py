"""Whose gradient is a mean of what. Write `ExpertParallel.finish_gradient_sync` of
expert_parallel/train_moe.py.

Read notebooks/12_many_experts.ipynb first. Do not open expert_parallel/train_moe.py yet: it has the
solution.

You may use:

    average_gradients(parameters: Iterable[nn.Parameter], group: Group = None) -> None
        Replace each gradient by the mean over the group.

Check it with `python -m exercises check expert_gradients`.
"""

from training.gradients import average_gradients


def finish_gradient_sync(self) -> None:
    """Give each parameter the gradient that one process has for the batch of all ranks.

    `self.dense` are the parameters that every rank holds, and `self.experts` those of this rank's
    experts. `average_gradients(parameters, group)` replaces gradients by their mean over a group.
    Frozen parameters have none. `self.groups` has `everyone`, all ranks; `experts`,
    the ranks that share the experts; `replicas`, those that hold the same ones; and
    `num_expert_ranks`. Each rank's loss is the mean over its own tokens.
    """
    raise NotImplementedError("`ExpertParallel.finish_gradient_sync` is not written yet.")

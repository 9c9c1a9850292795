"""Parents and children in a binomial tree. Write `family` of comm/algorithms/tree.py.

Read notebooks/03_cost_of_a_message.ipynb first. Do not open comm/algorithms/tree.py yet: it contains the
solution.

You may use:

    wire.rank: int
        This rank's number in the group, from 0.
    wire.size: int
        The number of ranks.

Check it with `python -m exercises check binomial_tree`.
"""

from comm.wire.wire import Wire


def family(wire: Wire, root: int) -> tuple[int | None, list[int]]:
    """Return this rank's parent (None at the root) and its children, largest subtree first."""
    raise NotImplementedError("`family` is not written yet.")

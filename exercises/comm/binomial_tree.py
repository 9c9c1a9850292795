"""Parents and children in a binomial tree. Write `family` of comm/algorithms/tree.py.

Read notebooks/03_cost_of_a_message.ipynb first. Do not open comm/algorithms/tree.py yet: it has the
solution.

You may use:

    wire.rank: int, wire.size: int
        This rank's number, from 0, and the number of ranks.

Check it with `python -m exercises check binomial_tree`.
"""

from comm.wire.wire import Wire


def family(wire: Wire, root: int) -> tuple[int | None, list[int]]:
    """Return this rank's parent (None at the root) and its children, largest subtree first."""
    raise NotImplementedError("`family` is not written yet.")

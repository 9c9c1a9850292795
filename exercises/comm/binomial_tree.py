"""Parents and children in a binomial tree. Write `_family` of comm/algorithms/tree.py.

Check it with `python -m exercises check binomial_tree`.
"""

from comm.transport.wire import Wire


def _family(wire: Wire, root: int) -> tuple[int | None, list[int]]:
    """Return this rank's parent (None at the root) and its children, largest subtree first."""
    raise NotImplementedError(
        "Parents and children in a binomial tree is not written yet: `_family` has no body."
    )

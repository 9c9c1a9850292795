"""Dividing layers into stages. Write `cut` of pipeline_parallel/balance.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/balance.py yet: it has the solution.

You may use:

    refuse_too_many(stages: int, parts: int) -> None
        Raise WorkbookError if a stage would have no part.

Check it with `python -m exercises check splitter`.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from pipeline_parallel.stage import refuse_too_many


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Return the parts of each stage as ranges: neighbouring parts, at least one for each stage.

    Of all cuts take one whose most expensive stage is as cheap as can be; among these, one whose sum
    of squared costs is the smallest, so that stages are even; among these, the one whose stages end
    as late as can be, so that a part that costs nothing goes with the part before it. If there are
    fewer parts than stages, raise WorkbookError: {n} parts cannot be cut into {stages} stages: take
    fewer ranks or --chunks, or more --layers.
    """
    raise NotImplementedError("`cut` is not written yet.")

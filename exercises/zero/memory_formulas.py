"""The memory of each stage. Write `formula`, `of_one_process` and `owned` of zero/memory.py.

Read notebooks/06_zero_and_fsdp.ipynb first. Do not open zero/memory.py yet: it has the solution.

You may use:

    FORMULAS = ('P+G+O', 'P+G+O/n', 'P+G/n+O/n', '(P+G+O)/n')
    Held(parameters: float, gradients: float, optimizer_state: float)
        The sizes in bytes of the parameters, the gradients and the optimizer's state.
    WorkbookError
        Tell the user what is wrong and how to fix it.

Check it with `python -m exercises check memory_formulas`.
"""

from collections.abc import Sequence

from lab.launch.errors import WorkbookError
from zero.memory import FORMULAS, Held, Share


def formula(stage: int, full: Held, ranks: int) -> Held:
    """Return what one of `ranks` ranks holds by formula, if one process holds `full`.

    Held has three fields, in bytes: `parameters`, `gradients` and `optimizer_state`. Stage 0 is
    plain data parallel. Stage 1 divides the optimizer's state among the ranks, stage 2 also the
    gradients, and stage 3 also the parameters. The quotients may be fractions. For another stage
    raise WorkbookError with the text "ZeRO has the stages 1, 2 and 3, and 0 is without it; there is
    no stage {stage}." FORMULAS has an entry for each stage that exists.
    """
    raise NotImplementedError("`formula` is not written yet.")


def of_one_process(shares: Sequence[Share], states: int) -> Held:
    """Return the bytes that one process holds.

    Each share describes some parameters: `full` is how many numbers they have, `itemsize` the
    bytes of one, and `trained` tells whether they have gradients. The optimizer keeps `states`
    numbers for each number of a trained parameter, of the same itemsize.
    """
    raise NotImplementedError("`of_one_process` is not written yet.")


def owned(stage: int, shares: Sequence[Share], states: int) -> Held:
    """Return what this rank should hold, to the byte, without padding.

    Of each share this rank owns `mine` numbers. What a stage does not divide, every rank holds
    in full.
    """
    raise NotImplementedError("`owned` is not written yet.")

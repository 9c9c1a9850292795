"""A resumed run has another loss than an undisturbed one: it trains on the first batches again."""

from hybrid_parallel.run import Run
from hybrid_parallel.state import pieces_of, set_optimizer_steps
from lab.launch.errors import Complete, WorkbookError

TARGET = "hybrid_parallel.run.Run._load"
KILLER = (
    "tests.hybrid_parallel.test_resume.test_a_resumed_run_on_another_mesh_goes_on_where_the_first_one_was"
)
CAUSE = "A resumed run must go on as if it had not stopped"


def mutant(self: Run) -> int:
    args, step = self._args, self._saved.latest()
    if step is None:
        raise WorkbookError(f"{args.checkpoint} has no checkpoint to resume from.")
    extra = self._saved.load(step, pieces_of(self._hybrid))[0]
    if extra["made_with"] != (here := self._made_with()):
        raise WorkbookError(
            f"The checkpoint was made with {extra['made_with']}, and this run has {here}; give the same "
            "arguments, or another folder."
        )
    if step >= args.steps and args.auto_resume:
        raise Complete(f"{args.checkpoint} has a checkpoint of all {args.steps} steps; nothing is left.")
    if step >= args.steps:
        raise WorkbookError(f"The checkpoint has {step} steps already; ask for more with --steps.")
    set_optimizer_steps(self._hybrid, extra["optimizer_steps"])
    return 0

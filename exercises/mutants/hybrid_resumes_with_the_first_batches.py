"""A resumed run has another loss than an undisturbed one: it trains on the first batches again."""

from hybrid_parallel.run import Run
from hybrid_parallel.state import pieces_of, set_optimizer_steps

TARGET = "hybrid_parallel.run.Run._load"
KILLER = (
    "tests.hybrid_parallel.test_resume.test_a_resumed_run_on_another_mesh_goes_on_where_the_first_one_was"
)
CAUSE = "A resumed run must go on as if it had not stopped"


def mutant(self: Run) -> int:
    extra = self._saved.load(self._saved.latest(), pieces_of(self._hybrid))[0]
    set_optimizer_steps(self._hybrid, extra["optimizer_steps"])
    return 0

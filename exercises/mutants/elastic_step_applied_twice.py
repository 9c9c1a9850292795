"""A rank takes a step twice: it takes over the state of another, and keeps its own count of steps."""

from comm.exchange import exchange

TARGET = "hybrid_parallel.elastic.elastic.ElasticReplica.catch_up"
KILLER = (
    "tests.hybrid_parallel.test_elastic."
    "test_a_rank_that_missed_a_step_which_others_have_taken_takes_over_their_state_and_takes_it_once"
)
CAUSE = (  # the rank that is behind may first be seen by its parameters, or by a step that it takes alone
    "No rank may take a step twice, or miss one",
    "The ranks call different collectives, or the same ones in different orders",
)
SYMPTOM = "After a death the replicas differ: one of them has taken a step twice."


def mutant(self) -> None:
    counts = exchange(self.steps)
    if min(counts) == max(counts) > 0:
        return
    state = self._state_of(counts.index(max(counts)))
    if self.steps < max(counts) or self.steps == 0:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

"""Weight decay shrinks a frozen tied embedding: its gradient is zeros instead of none."""

TARGET = "pipeline_parallel.pipeline.Pipeline._shared"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_a_frozen_embedding_gets_no_gradient"
CAUSE = "Zeros stand where no gradient should be"


def mutant(self):
    return [
        (self.stages[str(stage)].get_parameter(name), self.rank_of[other])
        for tie in self.ties
        for (stage, name), (other, _) in (tie, tie[::-1])
        if self.rank_of[stage] == self.rank
    ]

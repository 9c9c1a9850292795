"""After a resume the loss is worse for a while: all ranks have loaded the momentum of rank 0."""

from typing import Any

TARGET = "zero.sharded_optimizer.ShardedOptimizer.load_state_dict"
KILLER = (
    "tests.zero.test_sharded_optimizer"
    ".test_the_optimizer_state_of_another_rank_is_refused_and_a_ranks_own_is_loaded"
)
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(self, state_dict: dict[str, Any]) -> None:
    self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
    self.param_groups, self.state = self.inner.param_groups, self.inner.state

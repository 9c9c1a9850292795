"""In stage 3 AdamW's weight decay shrinks layers that no rank uses: zeros count as their gradients."""

TARGET = "zero.any_loop.AnyLoop._agree_on_gradients"
KILLER = "tests.zero.test_zero_mutant_killers.test_weight_decay_does_not_change_parameters_that_no_rank_used"
CAUSE = "Zeros stand where no gradient should be"


def mutant(self) -> None:
    self._order_so_far = 0
    self._is_synced = True

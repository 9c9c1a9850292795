"""After a caught exception the next step's gradients are too large: the failed step's are added to them."""

TARGET = "zero.any_loop.AnyLoop._give_up_backward"
KILLER = "tests.zero.test_zero3_exceptions.test_after_an_exception_in_any_pass_the_next_step_is_right"
CAUSE = "given up"


def mutant(self) -> None:
    if self._is_in_backward:
        self._end_backward()

"""A gradient penalty trains wrongly: gradients that come after a block's backward are lost."""

TARGET = "zero.any_loop.AnyLoop._send_late"
KILLER = "tests.zero.test_zero3_loops.test_forwards_and_backwards_may_come_in_any_number_and_order"
CAUSE = "never written"


def mutant(self) -> None:
    self._late.clear()

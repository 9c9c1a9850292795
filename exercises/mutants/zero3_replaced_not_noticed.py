"""A layer that was replaced after wrapping is not trained in sync, and its replicas drift apart."""

TARGET = "zero.wrapped.Wrapped.refuse_changes"
KILLER = "tests.zero.test_zero3_refusals.test_a_module_that_was_changed_after_wrapping_is_refused"
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(self) -> None:
    pass

"""A penalty on the parameters has no effect: its gradient goes to the shards and is overwritten there."""

TARGET = "zero.wrapped.refuse_penalties"
KILLER = "tests.zero.test_zero3_refusals.test_a_penalty_on_the_shards_is_refused"
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(names, units) -> None:
    pass

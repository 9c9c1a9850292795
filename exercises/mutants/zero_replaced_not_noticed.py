"""A new head does not learn: it was put into the model after the optimizer was made."""

TARGET = "zero.replaced.Replacements.find"
KILLER = "tests.zero.test_sharded_changes.test_replaced_parameters_are_refused_until_the_optimizer_has_them"
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(self) -> None:
    return None

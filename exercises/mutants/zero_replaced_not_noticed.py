"""A new head does not learn: it was put into the model after the optimizer was made."""

TARGET = "data_parallel.replaced.Replacements.find"
KILLER = (
    "tests.data_parallel.test_sharded_changes"
    ".test_replaced_parameters_are_refused_until_the_optimizer_has_them"
)
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(self) -> None:
    return None

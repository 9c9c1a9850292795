"""A new head does not learn: it was put into the model after the optimizer was made."""

TARGET = "data_parallel.replaced.Replacements.find"
KILLER = (
    "tests.data_parallel.test_sharded_changes."
    "test_parameters_that_were_replaced_in_part_are_refused_and_trained_once_the_optimizer_has_them"
)
FAILS_WITH = "DID NOT RAISE"


def mutant(self) -> None:
    return None

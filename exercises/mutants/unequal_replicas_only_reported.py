"""A run whose replicas have drifted apart exits with 0, so the script that started it sees no failure."""

TARGET = "lab.check.refuse_unequal"
KILLER = "tests.lab.test_check.test_unequal_replicas_are_refused_and_the_ranks_named"
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(digests: list[str]) -> None:
    pass  # "replicas_equal: False" stands in the report

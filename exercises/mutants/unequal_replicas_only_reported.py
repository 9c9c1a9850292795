"""The replicas have drifted apart, and the program that was started by a script exits with 0."""

TARGET = "lab.check.refuse_unequal"
KILLER = "tests.lab.test_check.test_unequal_replicas_are_refused_and_the_ranks_named"
FAILS_WITH = "DID NOT RAISE"


def mutant(digests: list[str]) -> None:
    pass  # "replicas_equal: False" stands in the report

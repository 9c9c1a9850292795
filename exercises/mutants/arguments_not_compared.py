"""One rank was started with another seed: the loss falls, the exit code is 0, and the model is worse."""

TARGET = "lab.same_start._differing"
KILLER = "tests.lab.test_same_start.test_every_rank_names_the_arguments_that_differ_and_their_ranks"


def mutant(arguments: list[dict[str, str]]) -> list[str]:
    return []  # the data is all that is compared

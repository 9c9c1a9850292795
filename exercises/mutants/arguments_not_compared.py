"""One rank runs with another seed: no error is raised, the loss falls, and the model is worse."""

TARGET = "lab.launch.same_start._differing"
KILLER = "tests.lab.test_same_start.test_every_rank_names_the_arguments_that_differ_and_their_ranks"
CAUSE = "Every rank must say the same"


def mutant(arguments: list[dict[str, str]]) -> list[str]:
    return []  # only the data is compared

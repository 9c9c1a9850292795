"""A list of costs that is too short cuts the last layers off, so a smaller model is trained."""

TARGET = "pipeline_parallel.split.costs_of"
KILLER = "tests.pipeline_parallel.test_split.test_costs_of_another_number_than_parts_lose_no_layer"


def mutant(model, parts, costs):
    return [part.cost for part in parts] if costs is None else list(costs)

"""With a list of costs that is too short, the last layers are missing in the pipeline."""

TARGET = "pipeline_parallel.split.costs_of"
KILLER = "tests.pipeline_parallel.test_split.test_costs_of_another_number_than_parts_lose_no_layer"
CAUSE = "left out"
SYMPTOM = "With a list of costs that is too short, a pipeline trains a smaller model, without an error."


def mutant(model, parts, costs):
    return [part.cost for part in parts] if costs is None else list(costs)

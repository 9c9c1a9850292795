"""With 5 ranks and 6 elements two ranks get nothing: torch.chunk rounds up, so the last shards are empty."""

TARGET = "comm.shards.shard_sizes"
KILLER = "tests.comm.test_cost.test_a_tensor_is_divided_as_by_tensor_split_and_its_segments_cover_it"
CAUSE = "may differ by one at most"


def mutant(numel: int, ranks: int) -> list[int]:
    longest = -(-numel // ranks)
    return [min(longest, max(0, numel - rank * longest)) for rank in range(ranks)]

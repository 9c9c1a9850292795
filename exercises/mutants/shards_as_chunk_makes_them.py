"""With 5 ranks and 6 elements two ranks get nothing: torch.chunk rounds up, and the last shards go short."""

TARGET = "comm.shards.shard_sizes"
KILLER = "tests.comm.test_cost.test_a_tensor_is_sharded_as_tensor_split_does_and_segmented_without_a_rest"


def mutant(numel: int, ranks: int) -> list[int]:
    longest = -(-numel // ranks)
    return [min(longest, max(0, numel - rank * longest)) for rank in range(ranks)]

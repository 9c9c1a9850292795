"""How a flat tensor is split: into one shard per rank, and a shard into segments on the wire.

The first `numel % ranks` shards hold one element more than the others, as in torch.tensor_split, so
that any number of elements can be split over any number of ranks. With fewer elements than ranks the
last shards are empty; an empty shard is never sent.
"""

import torch

# Small enough that adding one segment overlaps with receiving the next, large enough that the cost
# of a message is small beside its payload: below 256 KiB gloo slows down.
SEGMENT_BYTES = 1 << 20
TCP_SEGMENT_BYTES = (
    1 << 22
)  # where one loop does everything (transport/socket_ring.py), longer stretches of the same pay


def shard_sizes(numel: int, ranks: int) -> list[int]:
    """Elements in each rank's shard."""
    base, longer = divmod(numel, ranks)
    return [base + (rank < longer) for rank in range(ranks)]


def shards_of(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The shards of a flat tensor, as views."""
    return list(flat.split(shard_sizes(flat.numel(), ranks)))


def segments_of(flat: torch.Tensor, segment_bytes: int | None = None) -> list[torch.Tensor]:
    """The pieces a flat tensor travels in, as views; none for an empty tensor."""
    if flat.numel() == 0:
        return []
    return list(flat.split(max(1, (segment_bytes or SEGMENT_BYTES) // flat.element_size())))

"""A checkpoint mixes the weights of two steps: a thread reads the tensors that the optimizer changes."""

from collections.abc import Iterable

from torch import Tensor

from hybrid_parallel.checkpoint_pieces import Part, Piece

TARGET = "hybrid_parallel.checkpoint.BackgroundCheckpoints._snapshot"
KILLER = (
    "tests.hybrid_parallel.test_checkpoint."
    "test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change"
)
CAUSE = "copied before the call returns"
SYMPTOM = "The losses jump after a restart, as if the weights of two steps were mixed."


def mutant(self, pieces: Iterable[Piece]) -> dict[Part, Tensor]:
    tensors: dict[Part, Tensor] = {}
    for piece in pieces:
        if piece.is_replica:
            continue
        part = piece.part
        if part in tensors:
            raise ValueError(f"this rank has {part} in two pieces")
        tensors[part] = piece.tensor.detach().reshape(-1)
    self._buffers = tensors
    return tensors

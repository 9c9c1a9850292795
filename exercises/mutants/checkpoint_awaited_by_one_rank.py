"""A rank that reads the checkpoint sometimes finds the one before: only rank 0 waits until it is on disk."""

from pathlib import Path

from lab import checkpoint

TARGET = "training.checkpoint.FullState.save"
KILLER = "tests.training.test_checkpoint.test_no_rank_goes_on_before_the_checkpoint_is_on_disk"
CAUSE = "does rank 0 alone do or await"


def mutant(self, cluster, folder: str, header: dict) -> None:
    state = header | self.get()
    if cluster.is_main:
        checkpoint.save(Path(folder), state)

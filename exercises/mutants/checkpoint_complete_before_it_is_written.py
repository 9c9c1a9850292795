"""A checkpoint cannot be loaded: its manifest was renamed before the files of all ranks were on disk."""

import json

from hybrid_parallel import checkpoint_folder as files
from lab.launch.errors import reason

TARGET = "hybrid_parallel.checkpoint.BackgroundCheckpoints._write"
KILLER = (
    "tests.hybrid_parallel.test_checkpoint."
    "test_a_checkpoint_becomes_visible_only_when_the_files_of_all_ranks_are_complete"
)
CAUSE = "before the last of its files"
SYMPTOM = "After a disk was full for a moment, the newest checkpoint lacks the file of a rank."


def mutant(self, step: int, tensors: dict, values: dict) -> None:
    rank, failure = self._cluster.rank, ""
    files.folder_of(self._folder, step).mkdir(exist_ok=True)
    parts = [files.as_json(part) for part in files.describe(rank, tensors)]
    self._complete(step, json.dumps(values | {"parts": parts, "failure": failure}))
    try:
        files.write_rank(self._folder, step, rank, self._token, tensors)
    except Exception as error:
        failure = f"rank {rank}: {reason(error)}"

"""A bit of a checkpoint has flipped on disk, and training resumes from a wrong weight without an error."""

from pathlib import Path

from lab.launch.errors import WorkbookError

TARGET = "training.range_checkpoint._refuse_damaged"
KILLER = "tests.training.test_range_checkpoint.test_every_flipped_bit_is_noticed_and_all_ranks_name_the_file"
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(folder: Path, digests: dict[str, str]) -> None:
    for name in digests:
        if (folder / name).stat().st_size == 0:
            raise WorkbookError(f"{folder / name} is damaged: resume from another checkpoint")

"""Every train script does what all of them promise: reports, formulas, checkpoints, refusals.

All scripts run one after the other on the same ranks: 2 steps on one rank; the first of them on 4 ranks,
with a checkpoint; and the second from that checkpoint on 2 ranks, where a tree carries the messages.
"""

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.on_ranks import on_ranks
from tests.run_modes import FIELDS, SCRIPTS, offers, train

SHORT = ("--size", "tiny", "--batch-size", "8", "--lr", "3e-3", "--seed", "1")
OPTIONS = {
    "context_ring": ("--length", "50"),  # which no number of ranks divides
    "context_all_to_all": ("--length", "50"),
    "data_parallel_bucket_overlap": ("--bucket-mb", "0.01"),
    "data_parallel_compressed": ("--compress", "float32"),
    "diloco_plain": ("--sync-every", "1"),
}
# These have tests of their own.
OTHERS = ("comm", "point_to_point", "train", "diloco_elastic", "hybrid_elastic", "hybrid_elastic_mesh")
TRAINED = [mode for mode in SCRIPTS if mode not in OTHERS]
OPTIONS |= {mode: ("--microbatches", "4", "--layers", "6") for mode in TRAINED if "pipeline" in mode}
RESUMED = [mode for mode in TRAINED if offers(mode, "checkpoint")]
ON_A_TREE = [mode for mode in TRAINED if offers(mode, "pattern", "tree")]
FAMILIES = ("data_parallel", "zero", "fsdp", "tensor", "sequence")  # they train the same model
SIZES = (1, 2, 4)
Reports = dict[str, list[dict[str, Any]]]  # by RUN_MODE, those of all ranks


def short(cluster: Cluster, mode: str, *options: str) -> dict[str, Any]:
    return train(cluster, mode, *SHORT, *OPTIONS.get(mode, ()), *options)


def reports_on(world_size: int, folder: Path | None = None, resume: bool = False) -> Reports:
    def work(cluster: Cluster) -> dict[str, dict[str, Any]]:
        found = {}
        for mode in TRAINED:
            options = ["--steps", "2"]
            if folder is not None and mode in RESUMED:
                own = ["--checkpoint", str(folder / mode)]
                options = [*options, *own, "--resume"] if resume else ["--steps", "1", *own]
            if world_size == 2 and mode in ON_A_TREE:
                options += ["--pattern", "tree"]
            found[mode] = short(cluster, mode, *options)
        return found

    by_rank = run_ranks(work, world_size, timeout=300)
    return {mode: [of_rank[mode] for of_rank in by_rank] for mode in TRAINED}


@functools.cache
def everyones() -> dict[int, Reports]:
    """Return the reports of all ranks, by their number."""
    folder = Path(tempfile.mkdtemp())
    try:
        return {1: reports_on(1), 4: reports_on(4, folder), 2: reports_on(2, folder, resume=True)}
    finally:
        shutil.rmtree(folder)


def reports(world_size: int) -> Reports:
    return everyones()[world_size]


@pytest.mark.parametrize("world_size", SIZES)
def test_a_report_begins_with_the_same_rows_in_every_mode(world_size: int):
    for mode, by_rank in reports(world_size).items():
        steps = 1 if mode in RESUMED and world_size > 1 else 2
        for report in by_rank:
            assert list(report)[: len(FIELDS)] == FIELDS, mode
            assert (report["run_mode"], report["world_size"], report["steps"]) == (mode, world_size, steps)
            assert report["tokens_per_second"] > 0 < report["peak_memory_bytes"], mode
            assert report["step_seconds"] >= (report.get("compute_seconds") or 0), mode


@pytest.mark.parametrize("world_size", SIZES)
def test_every_rank_sends_exactly_what_the_formula_says(world_size: int):
    for mode, by_rank in reports(world_size).items():
        for report in by_rank:
            assert report["bytes_sent"] == report["bytes_formula"], mode
            assert report["messages_sent"] == report["messages_formula"], mode
        assert (sum(report["bytes_sent"] for report in by_rank) > 0) == (world_size > 1), mode


@pytest.mark.parametrize("world_size", SIZES)
def test_all_ranks_end_with_the_same_full_model(world_size: int):
    for mode, by_rank in reports(world_size).items():
        assert len({report["replica_digest"] for report in by_rank}) == 1, mode
        assert all(report["replicas_equal"] for report in by_rank), mode


@pytest.mark.parametrize("mode", [mode for mode in TRAINED if "diloco" not in mode and mode != "local_sgd"])
def test_the_losses_are_those_of_one_process_also_after_a_resume_on_other_ranks(mode: str):
    [alone] = reports(1)[mode]
    is_resumed = mode in RESUMED
    fields = {4: ["first_loss"], 2: ["last_loss", "validation_loss"]}
    for world_size in (4, 2):
        for report in reports(world_size)[mode]:
            for field in fields[world_size] if is_resumed else [*fields[4], *fields[2]]:
                assert report[field] == pytest.approx(alone[field], rel=1e-4), (world_size, field)


def test_scripts_that_train_the_same_model_on_the_same_batches_have_the_same_losses():
    same = [mode for mode in TRAINED if mode.startswith(FAMILIES)]
    assert len(same) > 10
    for field in ("last_loss", "validation_loss"):
        losses = [reports(2)[mode][0][field] for mode in same]
        assert losses == pytest.approx([losses[0]] * len(same), rel=1e-4)


def test_a_tree_carries_all_messages_if_it_is_chosen():
    for mode in ON_A_TREE:
        # A pipeline may send to its neighbours only, without a collective.
        for report in reports(2)[mode]:
            patterns = set(report["pattern"].split(", "))
            assert "tree" in patterns or patterns == {"direct"}, mode


@on_ranks(2, timeout=120)
def test_ranks_with_different_arguments_are_refused_by_all_with_the_option_and_the_ranks(cluster: Cluster):
    for mode in TRAINED:
        own = ("--lr", "0.5") if cluster.rank == 1 else ()
        with pytest.raises(WorkbookError, match=r"^--lr is 0.003 on rank 0 and 0.5 on rank 1: start"):
            short(cluster, mode, *own)

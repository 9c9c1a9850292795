"""Test what a kill, a full disk, a truncation or another program's file can do to files of all ranks."""

import functools
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab import checkpoint
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranges import Items, Range, Writer
from lab.ranks import RankError, run_ranks
from tests.training.range_items import items, load, refusal, save, the_one
from training import range_checkpoint
from training.range_checkpoint import METADATA


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (3, 2), (1, 3)])
def test_any_number_of_ranks_reads_what_another_saved_and_only_the_newest_stays(tmp_path, before, after):
    for value in (1.0, 2.0):
        run_ranks(save, before, tmp_path / "new", value)
    assert run_ranks(load, after, tmp_path / "new") == [2.0] * after
    assert os.listdir(tmp_path / "new") == ["checkpoint-2"]


def killed(cluster: Cluster, directory: Path, rank: int, where: str, call: int) -> None:
    """Save, and have one rank killed when it comes to a function for the `call`-th time."""
    calls = 0

    def die(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    owner: Any = {"write_data": Writer, "write": checkpoint, "rename": os}.get(where, shutil)
    if cluster.rank == rank:
        setattr(owner, where, functools.partial(die, getattr(owner, where)))
    save(cluster, directory, 2.0)


@pytest.mark.parametrize(
    ("rank", "where", "call", "survivor"),
    [
        (1, "write_data", 1, 1.0),  # before all have written
        (0, "write", 1, 1.0),  # the header
        (0, "rename", 1, 1.0),
        (0, "rmtree", 1, 2.0),  # before the older one goes
    ],
)
def test_whenever_the_job_is_killed_a_whole_checkpoint_is_there_and_the_next_save_clears_up(
    tmp_path, rank, where, call, survivor
):
    run_ranks(save, 2, tmp_path, 1.0)
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(killed, 2, tmp_path, rank, where, call, timeout=20)
    if rank == 0:  # who else would have cleared up
        assert len(os.listdir(tmp_path)) == 2

    def go_on(cluster: Cluster) -> tuple[float, float]:
        found = load(cluster, tmp_path)
        save(cluster, tmp_path, 3.0)
        return found, load(cluster, tmp_path)

    assert run_ranks(go_on, 2) == [(survivor, 3.0)] * 2
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize(("rank", "where"), [(1, "write_data"), (0, "rename")])
def test_when_a_rank_dies_in_a_save_the_others_say_so_at_once_in_a_sentence(tmp_path, rank, where):
    def work(cluster: Cluster) -> str:
        return refusal(killed, cluster, tmp_path, rank, where, 1)

    said = run_ranks(work, 3, timeout=20, group_timeout=15, collect_failures=True)
    assert "SIGKILL" in str(said.pop(rank))
    assert the_one(said) == f"cannot save the checkpoint {tmp_path}: another rank has died or left"


def test_a_disk_that_is_full_for_one_rank_is_every_ranks_error_and_the_older_checkpoint_stays(tmp_path):
    def work(cluster: Cluster, room: int) -> tuple[str, float]:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = 100_000
        large: Items = {"cut": Range(torch.zeros(size), size * cluster.rank, size * cluster.world_size)}
        if cluster.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        said = refusal(range_checkpoint.save, cluster, tmp_path, large, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        return said, load(cluster, tmp_path)

    run_ranks(save, 3, tmp_path, 1.0)
    for room in (0, 500, 100_000):
        (
            tmp_path / "checkpoint-2.partial-0123"
        ).mkdir()  # of a job that was killed: what would go, if all went well
        texts, values = zip(*run_ranks(work, 3, room, timeout=20), strict=True)
        assert the_one(texts) == f"cannot save the checkpoint {tmp_path}: on rank 1, File too large"
        assert values == (1.0,) * 3
        assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_a_place_that_cannot_be_written_is_every_ranks_error(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def work(cluster: Cluster) -> list[str]:
        return [refusal(save, cluster, tmp_path / "file" / name, 1.0) for name in (".", "folder")]

    for text in map(the_one, zip(*run_ranks(work, 2), strict=True)):
        assert "cannot save" in text and str(tmp_path / "file") in text


def test_a_header_that_would_not_load_is_refused_and_the_older_checkpoint_stays(tmp_path):
    def work(cluster: Cluster) -> float:
        save(cluster, tmp_path, 1.0)
        with pytest.raises((TypeError, WorkbookError), match="a checkpoint takes tensors, numbers"):
            range_checkpoint.save(cluster, tmp_path, items(cluster, 2.0), {"value": Path()})
        return load(cluster, tmp_path)

    assert run_ranks(work, 2) == [1.0, 1.0]
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_where_there_is_no_checkpoint_all_ranks_say_so(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / "checkpoint-1.partial-0123").mkdir(parents=True)
    (tmp_path / "file").write_text("not a folder")
    names = ["missing", "empty", "begun", "file"]

    def work(cluster: Cluster) -> list[str]:
        return [refusal(load, cluster, tmp_path / name) for name in names]

    for name, *texts in zip(names, *run_ranks(work, 2), strict=True):
        assert f"no checkpoint in {tmp_path / name} to resume from" in the_one(texts)


def test_a_missing_or_truncated_file_is_refused_by_its_name(tmp_path):
    run_ranks(save, 3, tmp_path, 1.0)
    folder = tmp_path / "checkpoint-1"
    files = {path: path.read_bytes() for path in folder.iterdir()}
    assert {path.name for path in files} >= {METADATA, checkpoint.NAME, "__1_0.distcp", "__2_0.distcp"}

    def work(cluster: Cluster) -> list[tuple[Path, str]]:
        said = []
        for path, data in files.items():
            for left in (None, 0, len(data) // 2, len(data) - 1):
                if cluster.is_main:
                    path.unlink() if left is None else path.write_bytes(data[:left])
                dist.barrier()
                said.append((path, refusal(load, cluster, tmp_path)))
                if cluster.is_main:
                    path.write_bytes(data)
                dist.barrier()
        load(cluster, tmp_path)
        return said

    first, *others = run_ranks(work, 3)
    assert all(said == first for said in others)
    for path, text in first:
        assert str(path) in text


def test_every_flipped_bit_is_noticed_and_all_ranks_name_the_file():
    def work(cluster: Cluster, directory: Path, places: int) -> list[tuple[Path, str]]:
        said = []
        for path in sorted((directory / "checkpoint-1").iterdir()):
            data = path.read_bytes()
            dist.barrier()
            for i in range(places):
                place = i * (len(data) - 1) // (places - 1)
                if cluster.is_main:
                    damaged = bytearray(data)
                    damaged[place] ^= 1 << i % 8
                    path.write_bytes(damaged)
                dist.barrier()
                said.append((path, refusal(load, cluster, directory)))
            if cluster.is_main:
                path.write_bytes(data)
            dist.barrier()
        load(cluster, directory)
        return said

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(save, 3, Path(folder), 1.0)
        # Most of them alone: on a busy machine ranks that meet ten times for each bit take a minute.
        for ranks, places in ((1, 24), (2, 2)):  # in each of 5 files, the first and the last byte among them
            first, *others = run_ranks(work, ranks, Path(folder), places, timeout=30)
            assert all(said == first for said in others)
            assert len(first) == 5 * places
            for path, text in first:
                assert text.startswith(f"{path} is damaged")


def test_a_second_job_in_the_folder_is_refused_by_all_its_ranks(tmp_path):
    checkpoint.claim(tmp_path)  # this process is the first job
    said = the_one(run_ranks(lambda cluster: refusal(save, cluster, tmp_path, 1.0), 2))
    assert said.startswith(f"another job saves its checkpoints in {tmp_path}: ")
    assert os.listdir(tmp_path) == []


def on_its_own_disk(cluster: Cluster, root: Path, action: Callable[..., Any]) -> str:
    """Return how an action on `run` is refused, if that is another folder for each rank."""
    (root / str(cluster.rank)).mkdir(exist_ok=True)
    os.chdir(root / str(cluster.rank))
    return refusal(action, cluster, Path("run"), *([1.0] if action is save else []))


def test_machines_that_do_not_share_the_directory_are_told_so(tmp_path):
    assert "all machines must share" in the_one(run_ranks(on_its_own_disk, 3, tmp_path, save))
    assert all(not list(tmp_path.glob(f"{rank}/run/*")) for rank in range(3))
    for machine in ("0", "0", "1"):
        run_ranks(save, 1, tmp_path / machine / "run", 1.0)
    assert "all machines must share" in the_one(run_ranks(on_its_own_disk, 2, tmp_path, load))
    run_ranks(save, 1, tmp_path / "1" / "run", 1.0)
    assert "different checkpoints" in the_one(run_ranks(on_its_own_disk, 2, tmp_path, load))

"""A checkpoint survives kills and failed writes, and what is damaged, foreign or missing is named."""

import hashlib
import json
import os
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch

from hybrid_parallel import checkpoint_folder as files
from hybrid_parallel import checkpoint_reading as reading
from hybrid_parallel.checkpoint import BackgroundCheckpoints
from hybrid_parallel.checkpoint_pieces import Piece
from lab import checkpoint
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.hybrid_parallel.checkpoint_toys import (
    load,
    load_step,
    pieces_of,
    refusal,
    save,
    written,
)


def test_a_disk_that_is_full_for_one_rank_costs_that_checkpoint_and_training_goes_on(tmp_path, capfd):
    def work(cluster: Cluster) -> tuple[str, list[int]]:
        checkpoints, steps = BackgroundCheckpoints(tmp_path, cluster), []
        for step, size in ((1, -1), (2, 1000), (3, -1)):
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if cluster.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            x = torch.full((1000,), float(step))
            piece = Piece("model/x", x, (2000,), start=1000 * cluster.rank)
            checkpoints.save(step, [piece], {})
            checkpoints._finish_writing()
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            steps.append(checkpoints.latest())
        said = refusal(checkpoints.wait)
        checkpoints.wait()  # raised once
        return said, steps

    sentence = f"cannot save the checkpoint of step 2 in {tmp_path}: rank 1: File too large"
    assert run_ranks(work, 2) == [(sentence, [1, 1, 3])] * 2
    assert capfd.readouterr().err.count(f"{sentence}; training goes on\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]


def test_a_folder_that_disappears_is_named_and_the_next_save_needs_it_back(tmp_path):
    def work(cluster: Cluster) -> tuple[str, int | None]:
        checkpoints = BackgroundCheckpoints(tmp_path / "run", cluster)
        x = [Piece("model/x", torch.zeros(3), (3,))]
        shutil.rmtree(tmp_path / "run")
        checkpoints.save(1, x, {})
        said = refusal(checkpoints.wait)
        (tmp_path / "run").mkdir()
        checkpoints.save(1, x, {})
        checkpoints.wait()
        return said, checkpoints.latest()

    [(said, latest)] = run_ranks(work, 1)
    assert said.startswith(
        f"cannot save the checkpoint of step 1 in {tmp_path / 'run'}: rank 0: No such file"
    )
    assert latest == 1


def test_a_place_that_cannot_be_a_folder_is_refused_by_all_ranks_at_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    said = run_ranks(lambda cluster: refusal(BackgroundCheckpoints, tmp_path / "file" / "run", cluster), 2)
    assert said[0] == said[1] and str(tmp_path / "file") in said[0]


def test_every_flipped_bit_is_named_with_its_file_and_that_of_a_number_also_with_tensor_and_rank(tmp_path):
    """Where a bit of a header has flipped, the file is named."""
    written(tmp_path, [pieces_of(rank, 2, 3.0) for rank in range(2)])
    folder = tmp_path / "step-0"

    def fill() -> None:
        manifest = files.read_manifest(tmp_path, 0)
        wanted = [Piece(p.name, torch.empty_like(p.tensor), p.shape) for p in pieces_of(0, 1, 0.0)]
        reading.fill(folder, manifest, wanted)

    fill()
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little") if path.name != files.MANIFEST else len(data)
        for place in range(len(data)):
            damaged = bytearray(data)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            said = refusal(fill)
            assert said.startswith(f"{path} is damaged"), place
            if place >= begin:
                assert f"rank {path.name[5]} saved other numbers as " in said
        path.write_bytes(data)
    fill()


def test_all_ranks_name_what_one_of_them_finds_damaged(tmp_path):
    run_ranks(save, 2, tmp_path, 1, 2)
    [path] = (tmp_path / "step-2").glob("rank-1-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def work(cluster: Cluster) -> tuple[str, int]:
        checkpoints = BackgroundCheckpoints(tmp_path, cluster)
        said = refusal(load_step, checkpoints, cluster, 2)
        load_step(checkpoints, cluster, 1)
        return said

    said = set(run_ranks(work, 2))
    part = "model/weight [0:6, 0:8], elements 24:48"
    assert said == {
        f"{path} is damaged: rank 1 saved other numbers as {part}; remove {path.parent} to resume from an "
        "earlier checkpoint"
    }


def test_a_file_that_is_missing_or_cut_off_is_named(tmp_path):
    run_ranks(save, 2, tmp_path, 1)
    [path] = (tmp_path / "step-1").glob("rank-1-*")
    data = path.read_bytes()
    for left in (b"", data[:100], data[:-1], None):
        path.write_bytes(left) if left is not None else path.unlink()
        said = set(run_ranks(lambda cluster: refusal(load, cluster, tmp_path), 2))
        what = "is damaged" if left is not None else "is missing"
        assert len(said) == 1 and said.pop().startswith(f"{path} {what}")


def test_a_checkpoint_of_another_model_is_refused_by_all_ranks_and_says_how_it_differs(tmp_path):
    run_ranks(save, 2, tmp_path, 1)
    x = torch.zeros(6, 8, dtype=torch.float64)
    weight, bias = Piece("model/weight", x, (6, 8)), Piece("model/bias", x[0, :5], (5,))
    cases = [
        ([Piece("model/weight", x[:5], (5, 8))], "model/weight has shape (6, 8) and dtype float64"),
        ([Piece("model/weight", x.float(), (6, 8))], "and shape (6, 8) and dtype float32 in this run"),
        ([weight, Piece("model/other", x, (6, 8))], "it has no model/other"),
        ([weight, bias], "it has optimizer/step, and this run does not"),
    ]

    def work(cluster: Cluster) -> list[str]:
        checkpoints = BackgroundCheckpoints(tmp_path, cluster)
        return [refusal(checkpoints.load, 1, wanted if cluster.rank else wanted[:1]) for wanted, _ in cases]

    one, other = run_ranks(work, 2)
    assert one == other
    for said, (_, words) in zip(one, cases, strict=True):
        assert said.startswith(f"{tmp_path / 'step-1'} is of another model: ") and words in said


@pytest.mark.parametrize(
    ("name", "words"),
    [(checkpoint.NAME, "a checkpoint in one file"), ("checkpoint-4", "torch.distributed.checkpoint")],
)
def test_checkpoints_of_other_lessons_are_refused_by_name_and_left_alone(tmp_path, name, words):
    (tmp_path / name).mkdir()
    for said in run_ranks(lambda cluster: refusal(BackgroundCheckpoints, tmp_path, cluster), 2):
        assert said.startswith(f"{tmp_path} holds {name}, ") and words in said
    assert os.listdir(tmp_path) == [name]


def change_manifest(path: Path, **changes: object) -> None:
    """Write a manifest with other values and the right hash."""
    found = json.loads(path.read_bytes()[: -checkpoint.SEAL_BYTES])
    text = json.dumps(found | changes).encode()
    path.write_bytes(text + checkpoint.seal(hashlib.sha256(text)))


def test_another_version_of_the_format_and_paths_that_lead_elsewhere_are_refused(tmp_path):
    written(tmp_path, [pieces_of(0, 1, 3.0)])
    path = tmp_path / "step-0" / files.MANIFEST
    for changes, words in (
        ({"format": "workbook 9"}, "has the format 'workbook 9', and this program reads"),
        ({"files": ["../../secret.safetensors"]}, "does not hold what this run saves"),
        ({"files": []}, "does not hold what this run saves"),
        ({"parts": [{"part": {}}]}, "does not hold what this run saves"),
        ({"block": 0}, "does not hold what this run saves"),
    ):
        data = path.read_bytes()
        change_manifest(path, **changes)
        said = refusal(files.read_manifest, tmp_path, 0)
        assert said.startswith(str(path)) and words in said
        path.write_bytes(data)


def test_a_run_that_has_not_started_from_the_checkpoints_of_its_folder_does_not_touch_them(tmp_path):
    run_ranks(save, 2, tmp_path, 7)

    def work(cluster: Cluster) -> str:
        checkpoints = BackgroundCheckpoints(tmp_path, cluster)
        return refusal(checkpoints.save, 1, pieces_of(cluster.rank, 2, 1), {})

    said = set(run_ranks(work, 2))
    begin = f"{tmp_path} has the checkpoint of step 7, from which this run has not started: "
    assert said == {f"{begin}resume from it, or name another folder"}
    assert run_ranks(load, 2, tmp_path) == [7, 7]


def test_what_is_not_there_is_said_in_a_sentence(tmp_path):
    def work(cluster: Cluster) -> tuple[int | None, str]:
        checkpoints = BackgroundCheckpoints(tmp_path, cluster)
        return checkpoints.latest(), refusal(checkpoints.load, 3, [])

    assert run_ranks(work, 2) == [(None, f"there is no complete checkpoint of step 3 in {tmp_path}")] * 2


def test_a_second_job_in_the_folder_is_refused_by_all_its_ranks(tmp_path):
    checkpoint.claim(tmp_path)  # this process is the first job
    said = set(run_ranks(lambda cluster: refusal(BackgroundCheckpoints, tmp_path, cluster), 2))
    assert len(said) == 1 and said.pop().startswith(f"another job saves its checkpoints in {tmp_path}: ")


def test_saving_does_not_delay_what_the_training_asks_the_store(tmp_path):
    def work(cluster: Cluster) -> float:
        checkpoints = BackgroundCheckpoints(tmp_path, cluster)
        write = files.write_rank
        if cluster.rank == 1:
            files.write_rank = lambda *args: (time.sleep(1), write(*args))
        checkpoints.save(1, pieces_of(cluster.rank, 2, 1), {"step": 1, "rank": cluster.rank})
        begin = time.perf_counter()
        cluster.store.add("other", 1)
        seconds = time.perf_counter() - begin
        checkpoints.wait()
        return seconds

    assert max(run_ranks(work, 2)) < 0.5

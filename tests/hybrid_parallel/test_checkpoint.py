"""A checkpoint is saved while training goes on, loads on any mesh, and the last ones are kept."""

import contextlib
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybrid_parallel import checkpoint_folder as files
from hybrid_parallel.checkpoint import BackgroundCheckpoints, random_state, set_random_state
from hybrid_parallel.checkpoint_pieces import Piece
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.hybrid_parallel.checkpoint_toys import full, load, load_step, pieces_of, refusal, save


@pytest.mark.parametrize(
    ("before", "tensor_before", "after", "tensor_after"),
    [(1, 1, 1, 1), (4, 2, 4, 2), (4, 2, 2, 1), (2, 2, 4, 1), (3, 1, 4, 4), (4, 4, 3, 3)],
)
def test_a_mesh_loads_what_another_has_saved(tmp_path, before, tensor_before, after, tensor_after):
    run_ranks(save_on, before, tmp_path, tensor_before)
    assert run_ranks(load, after, tmp_path, tensor_after) == [2] * after


def save_on(cluster: Cluster, folder: Path, tensor: int) -> None:
    save(cluster, folder, 1, 2, tensor=tensor)


def test_the_last_ones_are_kept_and_an_older_one_goes_only_after_a_newer_one_is_complete(tmp_path):
    seen: list[list[int]] = []

    def work(cluster: Cluster) -> list[list[int]]:
        remove = files.keep_newest

        def spied(*args) -> None:
            seen.append(files.complete_steps(tmp_path))
            remove(*args)

        with mock.patch.object(files, "keep_newest", spied):
            save(cluster, tmp_path, 2, 4, 6, 8, keep=2)
        return seen

    assert run_ranks(work, 2)[0] == [[2], [2, 4], [2, 4, 6], [4, 6, 8]]
    assert sorted(os.listdir(tmp_path)) == ["step-6", "step-8"]


def test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change():
    def work(cluster: Cluster, folder: Path) -> tuple[float, list[int]]:
        gate, write = threading.Event(), files.write_rank

        def slow(*args) -> None:
            gate.wait(30)
            write(*args)

        checkpoints = BackgroundCheckpoints(folder, cluster)
        x, data = torch.full((100,), 1.0), {"epoch": 0, "next_batch": 7}
        pieces = [Piece("model/x", x, (2, 100), ((cluster.rank, cluster.rank + 1), (0, 100)))]
        with mock.patch.object(files, "write_rank", slow):
            checkpoints.save(1, pieces, {"data": data})
            x.add_(1)  # the training goes on
            data["next_batch"] += 1
            torch.distributed.all_reduce(x)  # while the writing has not ended
            assert checkpoints.latest() is None
            gate.set()
            checkpoints.wait()
        extras = checkpoints.load(1, pieces)
        return x.tolist()[0], [extra["data"]["next_batch"] for extra in extras]

    with tempfile.TemporaryDirectory() as folder:
        for value, next_batch in run_ranks(work, 2, Path(folder), timeout=40):
            assert (value, next_batch) == (1.0, [7, 7]), "what changed after the call of save was saved"


def test_the_caller_waits_for_the_copy_and_not_for_the_disk(tmp_path):
    def work(cluster: Cluster) -> tuple[float, float]:
        checkpoints = BackgroundCheckpoints(tmp_path, cluster)
        x = torch.zeros(4_000_000)
        calls, totals = [], []
        for step in range(4):
            begin = time.perf_counter()
            checkpoints.save(step, [Piece("model/x", x, (4_000_000,))], {})
            calls.append(time.perf_counter() - begin)
            checkpoints.wait()
            totals.append(time.perf_counter() - begin)
        return min(calls[1:]), min(totals[1:])  # the first call also allocates

    [(call, total)] = run_ranks(work, 1)
    assert call < total / 2


def test_a_second_save_waits_for_the_first_and_a_step_is_saved_once(tmp_path):
    def work(cluster: Cluster) -> list[int]:
        begun: list[int] = []
        write = files.write_rank

        def spied(directory, step, *args) -> None:
            begun.append(step)
            assert files.complete_steps(tmp_path) == sorted(set(begun[:-1]))
            write(directory, step, *args)

        with mock.patch.object(files, "write_rank", spied):
            save(cluster, tmp_path, 1, 2, 2, 3)
        return begun

    assert run_ranks(work, 2) == [[1, 2, 3]] * 2


def test_a_run_goes_on_with_its_random_numbers(tmp_path):
    def work(cluster: Cluster) -> bool:
        torch.manual_seed(cluster.rank)
        torch.rand(5)
        checkpoints = BackgroundCheckpoints(tmp_path, cluster)
        piece = Piece("model/x", torch.ones(1), (1,), is_replica=cluster.rank > 0)
        checkpoints.save(1, [piece], {"random": random_state()})
        expected = torch.rand(5)
        torch.manual_seed(99)
        set_random_state(checkpoints_of(checkpoints)[cluster.rank]["random"])
        return torch.equal(torch.rand(5), expected)

    def checkpoints_of(checkpoints: BackgroundCheckpoints) -> list[dict]:
        checkpoints.wait()
        return checkpoints.load(1, [Piece("model/x", torch.zeros(1), (1,))])

    assert run_ranks(work, 3) == [True] * 3


def test_a_checkpoint_becomes_visible_only_when_the_files_of_all_ranks_are_complete():
    def work(cluster: Cluster, folder: Path) -> tuple[str, int | None]:
        def full_disk(*args) -> None:
            if cluster.rank == 1:
                time.sleep(0.3)  # the other rank has written long ago
                raise OSError(28, "No space left on device")
            write(*args)

        checkpoints, write = BackgroundCheckpoints(folder, cluster), files.write_rank
        checkpoints.save(1, pieces_of(cluster.rank, 2, 1), {"step": 1, "rank": cluster.rank})
        checkpoints.wait()
        with mock.patch.object(files, "write_rank", full_disk):
            checkpoints.save(2, pieces_of(cluster.rank, 2, 2), {"step": 2, "rank": cluster.rank})
            with contextlib.suppress(RuntimeError):
                checkpoints.wait()
        return checkpoints.latest()

    with tempfile.TemporaryDirectory() as folder:
        latest = run_ranks(work, 2, Path(folder), timeout=20)
        assert latest == [1, 1], "a checkpoint is visible before the files of all ranks are complete"
        assert run_ranks(load, 2, Path(folder)) == [1, 1]


def test_going_on_from_an_older_step_removes_later_ones_only_when_a_new_one_is_complete(tmp_path):
    def work(cluster: Cluster) -> list[int]:
        save(cluster, tmp_path, 1, 2, 3)
        checkpoints = BackgroundCheckpoints(tmp_path, cluster, keep=2)
        load_step(checkpoints, cluster, 1)
        before = files.complete_steps(tmp_path)
        checkpoints.save(2, pieces_of(cluster.rank, cluster.world_size, 2), {"step": 2, "rank": cluster.rank})
        checkpoints.wait()
        return [*before, -1, *files.complete_steps(tmp_path), checkpoints.latest()]

    assert run_ranks(work, 2) == [[1, 2, 3, -1, 1, 2, 2]] * 2
    assert run_ranks(load, 2, tmp_path) == [2, 2]
    assert len(os.listdir(tmp_path / "step-2")) == 3  # the files that the first step 2 had are gone


def test_a_tied_tensor_is_found_under_its_other_name(tmp_path):
    def work(cluster: Cluster) -> bool:
        checkpoints = BackgroundCheckpoints(tmp_path, cluster)
        piece = Piece("model/weight", full("model/weight", 3.0), (6, 8))
        checkpoints.save(1, [piece], {}, tied={"model/head": "model/weight"})
        checkpoints.wait()
        head = torch.zeros(6, 8, dtype=torch.float64)
        checkpoints.load(1, [Piece("model/head", head, (6, 8))])
        return checkpoints.names(1) == {"model/weight"} and torch.equal(head, piece.tensor)

    assert run_ranks(work, 1) == [True]


def test_what_is_no_plain_value_is_refused_by_the_call_itself(tmp_path):
    def work(cluster: Cluster) -> str:
        checkpoints = BackgroundCheckpoints(tmp_path, cluster)
        with pytest.raises(TypeError) as caught:
            checkpoints.save(1, [], {"rng": torch.zeros(2)})
        return str(caught.value)

    assert "not JSON serializable" in run_ranks(work, 1)[0]
    refused = refusal(BackgroundCheckpoints, tmp_path, mock.Mock(), keep=0)
    assert refused == "keep is 0; at least 1 checkpoint must stay."


def test_the_manifest_is_json_and_a_hash_of_it(tmp_path):
    run_ranks(save, 1, tmp_path, 5)
    text, seal = (tmp_path / "step-5" / "manifest").read_text().rstrip("\n").rsplit("\n", 1)
    assert json.loads(text)["step"] == 5 and seal.startswith("sha256 ")

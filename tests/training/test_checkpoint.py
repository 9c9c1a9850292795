"""A checkpoint is saved in the background, complete or not at all, and loads in any layout."""

import contextlib
import hashlib
import json
import os
import resource
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.evil import Evil
from tests.training.checkpoint_toys import full, load, load_step, refusal, save, shards_of_rank
from training import checkpoint_storage as storage
from training.checkpoint import Checkpoints, Shard, boxes_of_range, claim, shards_of


def test_a_layout_loads_what_another_has_saved(tmp_path):
    layouts = [(1, 1), (4, 2), (3, 0), (4, 4), (3, 1)]
    for number, (ranks, tensor) in enumerate(layouts):
        folder = tmp_path / str(number)
        run_ranks(lambda cluster, f=folder, t=tensor: save(cluster, f, 1, 2, tensor=t), ranks)
        after, tensor_after = layouts[number - 1]
        assert run_ranks(load, after, folder, tensor_after) == [2] * after


def test_a_range_of_a_tensor_is_a_few_boxes_that_hold_its_elements_in_order():
    sizes = (3, 4, 5)
    full = torch.arange(60).view(sizes)
    for start in range(61):
        for end in range(start, 61):
            found = list(boxes_of_range(start, end, sizes))
            parts = [full[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in found]
            assert torch.cat([torch.empty(0), *(part.reshape(-1) for part in parts)]).tolist() == list(
                range(start, end)
            )
            assert len(found) <= 5


def test_ranks_that_hold_the_same_save_about_equally_much_and_nothing_twice(tmp_path):
    def work(cluster: Cluster) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(12)))
        shards = [one for name, p in model.named_parameters() for one in shards_of(name, p, None)]
        checkpoints = Checkpoints(tmp_path, cluster)
        checkpoints.save(1, shards)
        checkpoints.wait()

    run_ranks(work, 3)
    sizes = [path.stat().st_size for path in (tmp_path / "step-1").glob("*.distcp")]
    assert len(sizes) == 3 and max(sizes) < 1.2 * min(sizes)
    boxes = storage.read_manifest(tmp_path, 1).metadata.storage_data
    assert len(boxes) == 24


def test_what_only_some_ranks_hold_is_saved_by_one_of_them():
    def work(cluster: Cluster, folder: Path) -> None:
        own = [("router", 0), ("norm", 0), *((f"expert.{2 * (cluster.rank % 2) + i}", i) for i in range(2))]
        shards = [Shard(f"model/{name}", torch.full((3,), float(value))) for name, value in own]
        checkpoints = Checkpoints(folder, cluster)
        checkpoints.save(1, shards)
        checkpoints.wait()

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(work, 4, Path(folder))
        saved = storage.read_manifest(Path(folder), 1).tensors
    missing = {"router", "norm", *(f"expert.{i}" for i in range(4))} - {name[6:] for name in saved}
    assert not missing, f"{missing} is saved by no rank"


def test_the_state_of_an_optimizer_lies_where_its_parameter_does():
    """Two ranks train a half of a parameter each, and one resumes with all of it."""

    def trained(cluster: Cluster, folder: Path | None, world_size: int) -> dict[str, Any]:
        full = torch.linspace(1, 2, 10).view(2, 5)
        rows = 10 // world_size
        own = torch.nn.Parameter(full.view(-1)[cluster.rank * rows :][:rows].clone())
        optimizer = torch.optim.AdamW([own], lr=0.1)
        own.square().sum().backward()
        optimizer.step()
        if folder is not None:
            checkpoints = Checkpoints(folder, cluster)
            shards = shards_of("weight", own, optimizer, (2, 5), start=cluster.rank * rows)
            checkpoints.save(1, shards)
            checkpoints.wait()
        return {name: value.tolist() for name, value in optimizer.state[own].items()} | {"own": own.tolist()}

    def resumed(cluster: Cluster, folder: Path) -> dict[str, Any]:
        own = torch.nn.Parameter(torch.zeros(2, 5))
        optimizer, checkpoints = torch.optim.AdamW([own]), Checkpoints(folder, cluster)
        checkpoints.create_state(1, optimizer)
        checkpoints.load(1, shards_of("weight", own, optimizer))
        state = {name: value.reshape(-1) for name, value in optimizer.state[own].items()}
        return {name: value.tolist() for name, value in (state | {"own": own.view(-1)}).items()}

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(trained, 2, Path(folder), 2)
        [found] = run_ranks(resumed, 1, Path(folder))
    [alone] = run_ranks(trained, 1, None, 1)
    assert found == alone | {"step": [alone["step"]]}


def test_no_rank_goes_on_before_the_checkpoint_is_on_disk():
    def work(cluster: Cluster, folder: Path) -> bool:
        finish = storage.Writer.finish

        def slowly(*args, **kwargs) -> None:
            time.sleep(0.5)
            finish(*args, **kwargs)

        checkpoints = Checkpoints(folder, cluster)
        with mock.patch.object(storage.Writer, "finish", slowly):
            checkpoints.save(1, [Shard("model/x", torch.ones(3))])
            checkpoints.wait()
        return storage.complete_steps(folder) == [1]

    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(work, 3, Path(folder)) == [True] * 3


def test_the_last_ones_are_kept_and_an_older_one_goes_only_after_a_newer_one_is_complete(tmp_path):
    seen: list[list[int]] = []

    def work(cluster: Cluster) -> list[list[int]]:
        remove = storage.keep_newest

        def spied(*args) -> None:
            seen.append(storage.complete_steps(tmp_path))
            remove(*args)

        with mock.patch.object(storage, "keep_newest", spied):
            save(cluster, tmp_path, 2, 4, 6, 8, keep=2)
        return seen

    assert run_ranks(work, 2)[0] == [[2], [2, 4], [2, 4, 6], [4, 6, 8]]
    assert sorted(os.listdir(tmp_path)) == ["step-6", "step-8"]


def test_going_on_from_an_older_step_removes_later_ones_only_when_a_new_one_is_complete(tmp_path):
    def work(cluster: Cluster) -> list[int]:
        save(cluster, tmp_path, 1, 2, 3)
        checkpoints = Checkpoints(tmp_path, cluster, keep=2)
        load_step(checkpoints, cluster, 1)
        before = storage.complete_steps(tmp_path)
        shards = shards_of_rank(cluster.rank, cluster.world_size, 2)
        checkpoints.save(2, shards, {"step": 2, "rank": cluster.rank})
        checkpoints.wait()
        torch.distributed.barrier()  # rank 0 removes the old ones
        return [*before, -1, *storage.complete_steps(tmp_path), checkpoints.latest()]

    assert run_ranks(work, 2) == [[1, 2, 3, -1, 1, 2, 2]] * 2
    assert run_ranks(load, 2, tmp_path) == [2, 2]


def test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change():
    def work(cluster: Cluster, folder: Path) -> tuple[float, list[int]]:
        gate, write = threading.Event(), storage.write

        def slow(*args) -> None:
            gate.wait(30)
            write(*args)

        checkpoints = Checkpoints(folder, cluster)
        x, data = torch.full((1, 100), 1.0), {"epoch": 0, "next_batch": 7}
        shards = [Shard("model/x", x, (2, 100), (cluster.rank, 0))]
        with mock.patch.object(storage, "write", slow):
            checkpoints.save(1, shards, {"data": data})
            x.add_(1)  # the training goes on
            data["next_batch"] += 1
            torch.distributed.all_reduce(x)  # while the writing has not ended
            assert checkpoints.latest() is None
            gate.set()
            checkpoints.wait()
        checkpoints.load(1, shards)
        return x.tolist()[0][0], [extra["data"]["next_batch"] for extra in checkpoints.extras(1)]

    with tempfile.TemporaryDirectory() as folder:
        for value, next_batch in run_ranks(work, 2, Path(folder), timeout=40):
            assert (value, next_batch) == (1.0, [7, 7]), "what changed after the call of save was saved"


def test_a_second_save_waits_for_the_first_and_a_step_is_saved_once(tmp_path):
    def work(cluster: Cluster) -> list[str]:
        begun: list[str] = []
        write = storage.write

        def spied(final: Path, *args) -> None:
            begun.append(final.name)
            assert storage.complete_steps(tmp_path) == sorted(int(name[5:]) for name in set(begun[:-1]))
            write(final, *args)

        with mock.patch.object(storage, "write", spied):
            save(cluster, tmp_path, 1, 2, 2, 3)
        return begun

    assert run_ranks(work, 2) == [["step-1", "step-2", "step-3"]] * 2


def test_a_checkpoint_becomes_visible_only_when_the_files_of_all_ranks_are_complete():
    def work(cluster: Cluster, folder: Path) -> int | None:
        def full_disk(*args) -> None:
            if cluster.rank == 1:
                time.sleep(0.3)  # the other rank has written long ago
                raise OSError(28, "No space left on device")
            return write_data(*args)

        checkpoints, write_data = Checkpoints(folder, cluster), storage.Writer.write_data
        for step in (1, 2):
            with mock.patch.object(storage.Writer, "write_data", full_disk if step == 2 else write_data):
                checkpoints.save(
                    step, shards_of_rank(cluster.rank, 2, step), {"step": step, "rank": cluster.rank}
                )
                with contextlib.suppress(RuntimeError):
                    checkpoints.wait()
        return checkpoints.latest()

    with tempfile.TemporaryDirectory() as folder:
        latest = run_ranks(work, 2, Path(folder), timeout=20)
        assert latest == [1, 1], "a checkpoint is visible before the files of all ranks are complete"
        assert run_ranks(load, 2, Path(folder)) == [1, 1]


def test_after_a_write_has_failed_training_goes_on_and_the_next_save_is_complete(tmp_path, capfd):
    def work(cluster: Cluster) -> tuple[str, list[int | None]]:
        checkpoints, steps = Checkpoints(tmp_path, cluster), []
        for step, size in ((1, -1), (2, 1000), (3, -1)):
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if cluster.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            x = torch.full((1000,), float(step))
            checkpoints.save(step, [Shard("model/x", x, (2000,), start=1000 * cluster.rank)])
            checkpoints._finish_writing()
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            steps.append(checkpoints.latest())
        said = refusal(checkpoints.wait)
        checkpoints.wait()  # raised once
        return said, steps

    sentence = f"cannot save the checkpoint {tmp_path / 'step-2'}: on rank 1, File too large"
    assert run_ranks(work, 2) == [(sentence, [1, 1, 3])] * 2
    assert capfd.readouterr().err.count(f"{sentence}; training goes on\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]


def test_every_flipped_bit_is_named_with_its_file_and_tensor():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(save, 2, Path(folder), 2)
        check_that_flipped_bits_are_named(Path(folder))


def check_that_flipped_bits_are_named(directory: Path) -> None:
    folder, names = directory / "step-2", set()

    def look() -> None:
        storage.verify(storage.read_manifest(directory, 2))

    look()
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for place in range(0, len(data), 5 if path.name == storage.MANIFEST else 13):
            damaged = bytearray(data)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            said = refusal(look)
            assert said.startswith(f"{path} is damaged"), place
            names |= {name for name in ("model/weight", "model/bias", "model/filter") if name in said}
        path.write_bytes(data)
    look()
    assert names == {"model/weight", "model/bias", "model/filter"}


def test_a_file_that_is_damaged_cut_off_or_missing_is_named_by_all_ranks(tmp_path):
    run_ranks(save, 2, tmp_path, 1, 2)
    folder = tmp_path / "step-2"
    path = folder / "__1_0.distcp"
    data = path.read_bytes()
    for left, words in (
        (data[:-1], f"{path} is damaged, in "),
        (data + b"0", f"{path} is longer than it was"),
        (b"", f"{path} is damaged, in "),
        (None, f"{path} is missing"),
    ):
        path.write_bytes(left) if left is not None else path.unlink()

        def work(cluster: Cluster) -> str:
            checkpoints = Checkpoints(tmp_path, cluster)
            said = refusal(load_step, checkpoints, cluster, 2)
            load_step(checkpoints, cluster, 1)
            return said

        [said] = set(run_ranks(work, 2))
        way_out = f"; remove {folder} to resume from an earlier checkpoint"
        assert said.startswith(words) and said.endswith(way_out)


def test_no_file_of_a_checkpoint_runs_code_when_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(save, 1, tmp_path, 1)
    torch.save(Evil(), tmp_path / "step-1" / "__0_0.distcp")

    def work(cluster: Cluster) -> str:
        with mock.patch.object(storage, "verify"):  # as if the checksums were right, too
            return refusal(load, cluster, tmp_path)

    said = run_ranks(work, 1)
    assert said[0].startswith("cannot load the checkpoint") and os.listdir(tmp_path) == ["step-1"]


def change_manifest(path: Path, change) -> None:
    """Write a manifest with other values and the right hash."""
    text = change(path.read_text().rsplit("\n", 2)[0])
    path.write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")


def test_another_version_of_the_format_and_paths_that_lead_elsewhere_are_refused(tmp_path):
    run_ranks(save, 1, tmp_path, 1)
    path = tmp_path / "step-1" / storage.MANIFEST
    right = path.read_text()
    for before, after, words in (
        (storage.FORMAT, "workbook 9", "has the format 'workbook 9', and this program reads"),
        ("__0_0.distcp", "../../secret", "is damaged"),
        ('"float64"', '"save"', "is damaged"),
        ('"tensors"', '"tensor"', "is damaged"),
    ):
        change_manifest(path, lambda text, before=before, after=after: text.replace(before, after, 1))
        said = refusal(storage.read_manifest, tmp_path, 1)
        assert said.startswith(str(path)) and words in said
        path.write_text(right)
    assert json.loads(right.split("\n")[0])["extras"] == [{"step": 1, "rank": 0}]


def test_a_checkpoint_of_another_model_is_refused_by_all_ranks_and_says_how_it_differs(tmp_path):
    run_ranks(save, 2, tmp_path, 1)
    shards = shards_of_rank(0, 1, 0.0, 0)
    x = full("model/weight", 0)
    cases = [
        ([Shard("model/weight", x[:5])], "model/weight has shape (6, 12) and dtype torch.float64"),
        ([Shard("model/weight", x.float())], "and shape (6, 12) and dtype torch.float32 in this run"),
        ([*shards, Shard("model/other", x)], "it has no model/other"),
        (shards[:3], "it has optimizer/step/bias, and this run does not"),
    ]

    def work(cluster: Cluster) -> list[str]:
        checkpoints = Checkpoints(tmp_path, cluster)
        return [refusal(checkpoints.load, 1, wanted if cluster.rank else wanted[:1]) for wanted, _ in cases]

    one, other = run_ranks(work, 2)
    assert one == other
    for said, (_, words) in zip(one, cases, strict=True):
        assert said.startswith(f"{tmp_path / 'step-1'} is of another model: ") and words in said


def test_shards_that_leave_an_element_out_or_overlap_make_no_checkpoint(tmp_path):
    def work(cluster: Cluster) -> list[str]:
        x, said = torch.zeros(5), []
        for starts in ((0, 6), (0, 4)):
            checkpoints = Checkpoints(tmp_path, cluster)
            checkpoints.save(1, [Shard("model/x", x, (10,), start=starts[cluster.rank])])
            said.append(refusal(checkpoints.wait))
        return said

    for sentence in (said for of_rank in run_ranks(work, 2) for said in of_rank):
        assert "Failed to validate global plan: key:model/x" in sentence
    assert os.listdir(tmp_path) == []


def test_a_run_that_has_not_started_from_the_checkpoints_of_its_folder_does_not_touch_them(tmp_path):
    run_ranks(save, 2, tmp_path, 7)

    def work(cluster: Cluster) -> tuple[str, str]:
        checkpoints = Checkpoints(tmp_path, cluster)
        said = refusal(checkpoints.save, 1, shards_of_rank(cluster.rank, 2, 1), {})
        return said, refusal(checkpoints.load, 3, [])

    [(said, missing)] = set(run_ranks(work, 2))
    begin = f"{tmp_path} has the checkpoint of step 7, from which this run has not started: "
    assert said == f"{begin}resume from it, or name another folder"
    assert missing == f"there is no complete checkpoint of step 3 in {tmp_path}"
    assert run_ranks(load, 2, tmp_path) == [7, 7]


def test_a_folder_that_cannot_be_used_is_refused_by_all_ranks_at_once_and_one_that_goes_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "taken").mkdir()
    claim(tmp_path / "taken")  # this process is another job

    def work(cluster: Cluster) -> tuple[str, str, str, int | None]:
        said = refusal(Checkpoints, tmp_path / "file" / "run", cluster)
        second = refusal(Checkpoints, tmp_path / "taken", cluster)
        checkpoints, x = Checkpoints(tmp_path / "run", cluster), [Shard("model/x", torch.zeros(3))]
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(1, x, {"rng": torch.zeros(2)})
        gone = FileNotFoundError(2, "No such file")
        with mock.patch.object(storage.Writer, "write_data", side_effect=gone):
            checkpoints.save(1, x)
            third = refusal(checkpoints.wait)
        checkpoints.save(1, x)
        checkpoints.wait()
        return said, second, third, checkpoints.latest()

    [(said, second, third, latest)] = set(run_ranks(work, 2))
    assert str(tmp_path / "file") in said
    assert second.startswith(f"another job saves its checkpoints in {tmp_path / 'taken'}: ")
    assert third == f"cannot save the checkpoint {tmp_path / 'run' / 'step-1'}: on rank 0, No such file"
    assert latest == 1
    assert (
        refusal(Checkpoints, tmp_path, mock.Mock(), keep=0) == "keep is 0; at least 1 checkpoint must stay."
    )


def test_what_a_killed_job_has_left_goes_and_nothing_else(tmp_path):
    run_ranks(save, 1, tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-2.tmp-5f0c")
    (tmp_path / "other").touch()
    assert run_ranks(load, 2, tmp_path) == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["other", "step-1"]

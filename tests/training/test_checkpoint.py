"""A checkpoint is saved in the background, complete or not at all, and loads in any layout."""

import contextlib
import hashlib
import os
import resource
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.training.checkpoint_toys import Evil, full, load, load_step, refusal, save, shards_of_rank
from training import checkpoint
from training.checkpoint import (
    Checkpoints,
    Shard,
    Writer,
    boxes_of_range,
    claim,
    complete_steps,
    create_state,
    fill,
    read_manifest,
    shards_of,
)


def test_a_layout_loads_what_another_has_saved(tmp_path):
    layouts = [(4, 2), (3, 0), (3, 1)]
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
            assert [number for part in parts for number in part.flatten().tolist()] == list(range(start, end))
            assert len(found) <= 5


def test_ranks_that_hold_the_same_save_about_equally_much_and_nothing_twice(tmp_path):
    def work(cluster: Cluster) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(12)))
        shards = [one for name, p in model.named_parameters() for one in shards_of(name, p, None)]
        checkpoints = Checkpoints(tmp_path, cluster)
        checkpoints.save(1, shards)
        checkpoints.wait()

    run_ranks(work, 3)
    sizes = [path.stat().st_size for path in (tmp_path / "step-1").glob("rank-*")]
    assert len(sizes) == 3 and max(sizes) < 1.2 * min(sizes)
    assert len(read_manifest(tmp_path, 1).places) == 24


def test_what_only_some_ranks_hold_is_saved_by_one_of_them():
    def work(cluster: Cluster, folder: Path) -> None:
        own = [("router", 0), ("norm", 0), *((f"expert.{2 * (cluster.rank % 2) + i}", i) for i in range(2))]
        shards = [Shard(f"model/{name}", torch.full((3,), float(value))) for name, value in own]
        checkpoints = Checkpoints(folder, cluster)
        checkpoints.save(1, shards)
        checkpoints.wait()

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(work, 4, Path(folder))
        saved = read_manifest(Path(folder), 1).tensors
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
            shards = shards_of("weight", own, optimizer, shape=(2, 5), start=cluster.rank * rows)
            checkpoints.save(1, shards)
            checkpoints.wait()
        return {name: value.tolist() for name, value in optimizer.state[own].items()} | {"own": own.tolist()}

    def resumed(cluster: Cluster, folder: Path) -> dict[str, Any]:
        own = torch.nn.Parameter(torch.zeros(2, 5))
        optimizer, checkpoints = torch.optim.AdamW([own]), Checkpoints(folder, cluster)
        create_state(optimizer, checkpoints.find(1))
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
        finish = Writer.finish

        def slowly(*args, **kwargs) -> None:
            time.sleep(0.2)
            finish(*args, **kwargs)

        checkpoints = Checkpoints(folder, cluster)
        with mock.patch.object(Writer, "finish", slowly):
            checkpoints.save(1, [Shard("model/x", torch.ones(3))])
            checkpoints.wait()
        return complete_steps(folder) == [1]

    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(work, 3, Path(folder)) == [True] * 3


def test_saves_wait_for_each_other_and_the_last_ones_are_kept_until_a_newer_one_is_complete(tmp_path):
    def work(cluster: Cluster) -> tuple[list[int], list[list[int]]]:
        begun: list[int] = []
        seen: list[list[int]] = []
        write, remove = Checkpoints._write, checkpoint.keep_newest

        def noting(self: Checkpoints, step: int, *args) -> None:
            begun.append(step)
            write(self, step, *args)

        def removing(*args) -> None:
            seen.append(complete_steps(tmp_path))
            remove(*args)

        with (
            mock.patch.object(Checkpoints, "_write", noting),
            mock.patch.object(checkpoint, "keep_newest", removing),
        ):
            save(cluster, tmp_path, 2, 4, 4, 6, 8, keep=2)
        return begun, seen

    for rank, (begun, seen) in enumerate(run_ranks(work, 2)):
        assert begun == [2, 4, 6, 8], "a step is saved once"
        assert seen == ([] if rank else [[2], [2, 4], [2, 4, 6], [4, 6, 8]])
    assert sorted(os.listdir(tmp_path)) == ["step-6", "step-8"]


def test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change():
    def work(cluster: Cluster, folder: Path) -> tuple[float, int]:
        gate, write = threading.Event(), Checkpoints._write

        def slow(*args) -> None:
            gate.wait(30)
            write(*args)

        checkpoints = Checkpoints(folder, cluster)
        x, data = torch.full((1, 100), 1.0), {"epoch": 0, "next_batch": 7}
        shards = [Shard("model/x", x, (2, 100), (cluster.rank, 0))]
        with mock.patch.object(Checkpoints, "_write", slow):
            checkpoints.save(1, shards, {"data": data})
            x.add_(1)  # the training continues
            data["next_batch"] += 1
            torch.distributed.all_reduce(x)  # while the writing has not ended
            assert not complete_steps(folder)
            gate.set()
            checkpoints.wait()
        checkpoints.load(1, shards)
        return x.tolist()[0][0], checkpoints.find(1).extra["data"]["next_batch"]

    with tempfile.TemporaryDirectory() as folder:
        for value, next_batch in run_ranks(work, 2, Path(folder), timeout=40):
            assert (value, next_batch) == (1.0, 7), "what changed after the call of save was saved"


def test_a_checkpoint_becomes_visible_only_when_the_files_of_all_ranks_are_complete():
    def work(cluster: Cluster, folder: Path) -> list[int]:
        def full_disk(*args) -> None:
            if cluster.rank == 1:
                time.sleep(0.3)  # the other rank has written long ago
                raise OSError(28, "No space left on device")
            return write_data(*args)

        checkpoints, write_data = Checkpoints(folder, cluster), Writer.write_data
        for step in (1, 2):
            with mock.patch.object(Writer, "write_data", full_disk if step == 2 else write_data):
                checkpoints.save(step, shards_of_rank(cluster.rank, 2, step), {"step": step})
                with contextlib.suppress(RuntimeError):
                    checkpoints.wait()
        return complete_steps(folder)

    with tempfile.TemporaryDirectory() as folder:
        latest = run_ranks(work, 2, Path(folder), timeout=20)
        assert latest == [[1], [1]], "a checkpoint is visible before the files of all ranks are complete"
        assert run_ranks(load, 2, Path(folder)) == [1, 1]


def test_a_write_that_fails_is_named_by_all_ranks_at_the_next_save(tmp_path):
    def work(cluster: Cluster) -> str:
        checkpoints = Checkpoints(tmp_path, cluster)
        if cluster.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        shards = [Shard("model/x", torch.zeros(1000), (2000,), start=1000 * cluster.rank)]
        checkpoints.save(1, shards)
        return refusal(checkpoints.save, 2, shards)

    sentence = f"cannot save the checkpoint {tmp_path / 'step-1'}: on rank 1, File too large"
    assert run_ranks(work, 2) == [sentence] * 2


def test_every_flipped_bit_and_every_missing_byte_is_named_with_its_file_and_tensor(tmp_path):
    run_ranks(save, 2, tmp_path, 2)
    folder, names = tmp_path / "step-2", set()

    def look() -> None:
        fill(read_manifest(tmp_path, 2), shards_of_rank(0, 1, 0))

    look()
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for place in range(0, len(data), 19 if path.name == checkpoint.MANIFEST else 61):
            damaged = bytearray(data)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            said = refusal(look)
            assert said.startswith(f"{path} is damaged"), place
            names |= {name for name in ("model/weight", "model/bias", "model/filter") if name in said}
        path.write_bytes(data[:-9])
        assert refusal(look).startswith(f"{path} is damaged")
        path.write_bytes(data)
    look()
    assert names == {"model/weight", "model/bias", "model/filter"}


def test_damage_is_named_by_all_ranks_with_a_way_out_and_no_file_runs_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(save, 2, tmp_path, 1, 2)
    path = tmp_path / "step-2" / "rank-1"
    data = path.read_bytes()

    def refused(cluster: Cluster) -> str:
        return refusal(load_step, Checkpoints(tmp_path, cluster), cluster, 2)

    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    [damaged] = set(run_ranks(refused, 2))
    torch.save(Evil(), path)
    [evil] = set(run_ranks(refused, 2))
    path.unlink()
    [missing] = set(run_ranks(refused, 2))
    for said in (damaged, evil, missing):
        assert said.startswith(f"{path} is damaged, in ")
        assert said.endswith(f"; remove {path.parent} to resume from an earlier checkpoint")
    shutil.rmtree(path.parent)
    assert run_ranks(load, 2, tmp_path) == [1, 1]
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_checkpoint_of_another_format_or_model_is_refused_by_all_ranks(tmp_path):
    run_ranks(save, 2, tmp_path, 1)
    folder, shards, x = tmp_path / "step-1", shards_of_rank(0, 1, 0.0, 0), full("model/weight", 0)
    cases = [
        ([Shard("model/weight", x[:5]), *shards[1:]], "current: torch.Size([5, 12]) for model/weight"),
        ([*shards, Shard("model/other", x)], "Missing key in checkpoint state_dict: model/other."),
        (shards[:3], "is of another model: it has optimizer/step/bias, and this run does not"),
    ]

    def work(cluster: Cluster) -> list[str]:
        checkpoints = Checkpoints(tmp_path, cluster)
        said = [refusal(checkpoints.load, 1, wanted if cluster.rank else wanted[:1]) for wanted, _ in cases]
        return [*said, refusal(checkpoints.load, 3, [])]

    [(*said, absent)] = set(map(tuple, run_ranks(work, 2)))
    for sentence, (_, words) in zip(said, cases, strict=True):
        assert str(folder) in sentence and words in sentence
    assert absent == f"there is no complete checkpoint of step 3 in {tmp_path}"
    path = folder / checkpoint.MANIFEST
    text = path.read_text().rsplit("\n", 2)[0].replace(checkpoint.FORMAT, "workbook 9")
    path.write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    assert "has the format 'workbook 9', and this program reads" in refusal(read_manifest, tmp_path, 1)


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
    assert complete_steps(tmp_path) == []


def test_a_folder_that_another_job_uses_is_refused_and_what_a_killed_job_has_left_goes(tmp_path):
    claim(tmp_path)  # this process is another job
    [said] = set(run_ranks(lambda cluster: refusal(Checkpoints, tmp_path, cluster), 2))
    assert said.startswith(f"another job saves its checkpoints in {tmp_path}: ")
    folder = tmp_path / "own"
    run_ranks(save, 1, folder, 1)
    shutil.copytree(folder / "step-1", folder / "step-2.tmp-5f0c")
    (folder / "other").touch()
    assert run_ranks(load, 2, folder) == [1, 1]
    assert sorted(os.listdir(folder)) == ["other", "step-1"]

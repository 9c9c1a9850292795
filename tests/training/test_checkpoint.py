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

import pytest
import torch
import torch.distributed as dist

from comm.exchange import exchange
from lab.check import state_digest
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.on_ranks import on_ranks
from tests.refusals import refusal, the_one_sentence
from tests.training.checkpoint_toys import (
    Evil,
    full,
    load,
    load_step,
    save,
    save_once,
    shards_of_rank,
)
from training import checkpoint
from training.checkpoint import Checkpoints, claim, complete_steps, fill_shards, read_manifest
from training.state_shards import StateShard, buffer_shards, plain_shards, trained_shards
from zero.train_zero1 import ZeroOptimizer


def test_a_layout_loads_what_another_has_saved(tmp_path):
    layouts = [(4, 2), (3, 0), (3, 1)]
    for number, (ranks, tensor) in enumerate(layouts):
        folder = tmp_path / str(number)
        run_ranks(lambda cluster, f=folder, t=tensor: save(cluster, f, 1, 2, tensor=t), ranks)
        after, tensor_after = layouts[number - 1]
        assert run_ranks(load, after, folder, tensor_after) == [2] * after


def test_a_rank_that_ends_well_first_completes_a_save_for_which_nothing_has_waited(tmp_path):
    def end(cluster: Cluster, folder: Path) -> None:
        write = checkpoint.write_tensors
        checkpoint.write_tensors = lambda *given: (time.sleep(0.5), write(*given))
        shards = shards_of_rank(cluster.rank, cluster.world_size, 2)
        Checkpoints(folder, cluster).save(1, shards, {"value": 2})

    run_ranks(end, 2, tmp_path)
    assert run_ranks(load, 2, tmp_path) == [2, 2]


def test_a_shard_takes_its_elements_of_a_full_tensor_whatever_the_strides_are():
    full = torch.arange(1.0, 25).view(4, 6)
    permuted = torch.zeros(3, 2).T
    for tensor, where, right in (
        (torch.zeros(4), {"start": 5}, [6, 7, 8, 9]),
        (permuted, {"offset": (2, 3)}, [16, 17, 18, 22, 23, 24]),
        (torch.zeros(2, 2), {"offset": (3, 1)}, [20, 21, 0, 0]),  # the last row is padding
        (torch.zeros(5), {"offset": (1, 2), "box": (2, 2), "start": 1}, [10, 15, 16, 0, 0]),
    ):
        StateShard("x", tensor, (4, 6), **where).take_from(full)
        assert tensor.reshape(-1).tolist() == right


def test_ranks_that_hold_the_same_save_about_equally_much_and_nothing_twice(tmp_path):
    def work(cluster: Cluster) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(12)))
        shards = [one for name, p in model.named_parameters() for one in trained_shards(name, p, None)]
        save_once(cluster, tmp_path, shards)

    run_ranks(work, 3)
    sizes = [path.stat().st_size for path in (tmp_path / "step-1").glob("save-*")]
    assert len(sizes) == 3 and max(sizes) < 1.2 * min(sizes)
    assert sum(map(len, read_manifest(tmp_path, 1).tensors.values())) == 24


def test_what_only_some_ranks_hold_is_saved_by_one_of_them():
    def work(cluster: Cluster, folder: Path) -> None:
        own = [("router", 0), ("norm", 0), *((f"expert.{2 * (cluster.rank % 2) + i}", i) for i in range(2))]
        shards = [StateShard(f"model/{name}", torch.full((3,), float(value))) for name, value in own]
        save_once(cluster, folder, shards)

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(work, 4, Path(folder))
        names = ["router", "norm", *(f"expert.{i}" for i in range(4))]
        fill_shards(
            read_manifest(Path(folder), 1), [StateShard(f"model/{name}", torch.zeros(3)) for name in names]
        )


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
            shards = trained_shards("weight", own, optimizer, shape=(2, 5), start=cluster.rank * rows)
            save_once(cluster, folder, shards)
        return {name: value.tolist() for name, value in optimizer.state[own].items()} | {"own": own.tolist()}

    def resumed(cluster: Cluster, folder: Path) -> dict[str, Any]:
        own = torch.nn.Parameter(torch.zeros(2, 5))
        optimizer, checkpoints = torch.optim.AdamW([own]), Checkpoints(folder, cluster)
        checkpoints.load(1, trained_shards("weight", own, optimizer))
        state = {name: value.reshape(-1) for name, value in optimizer.state[own].items()}
        return {name: value.tolist() for name, value in (state | {"own": own.view(-1)}).items()}

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(trained, 2, Path(folder), 2)
        [found] = run_ranks(resumed, 1, Path(folder))
    [alone] = run_ranks(trained, 1, None, 1)
    assert found == alone | {"step": [alone["step"]]}


def test_no_rank_goes_on_before_the_checkpoint_is_on_disk():
    def work(cluster: Cluster, folder: Path) -> bool:
        write_manifest = checkpoint.write_manifest

        def slowly(*args) -> None:
            time.sleep(0.2)
            write_manifest(*args)

        with mock.patch.object(checkpoint, "write_manifest", slowly):
            save_once(cluster, folder, [StateShard("model/x", torch.ones(3))])
        return complete_steps(folder) == [1]

    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(work, 3, Path(folder)) == [True] * 3


def test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change():
    def work(cluster: Cluster, folder: Path) -> tuple[float, int]:
        gate, write = threading.Event(), Checkpoints._write

        def slow(*args) -> None:
            gate.wait(30)
            write(*args)

        checkpoints = Checkpoints(folder, cluster)
        x, data = torch.full((1, 100), 1.0), {"epoch": 0, "next_batch": 7}
        shards = [StateShard("model/x", x, (2, 100), (cluster.rank, 0))]
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
            write_tensors(*args)

        checkpoints, write_tensors = Checkpoints(folder, cluster), checkpoint.write_tensors
        for step in (1, 2):
            writing = full_disk if step == 2 else write_tensors
            with mock.patch.object(checkpoint, "write_tensors", writing):
                checkpoints.save(step, shards_of_rank(cluster.rank, 2, step), {"value": step})
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
        shards = [StateShard("model/x", torch.zeros(1000), (2000,), offset=(1000 * cluster.rank,))]
        checkpoints.save(1, shards)
        return refusal(checkpoints.save, 2, shards)

    sentence = the_one_sentence(run_ranks(work, 2))
    assert sentence.startswith(f"cannot save the checkpoint {tmp_path / 'step-1'}: on rank 1, ")
    assert "File too large" in sentence


def test_every_flipped_bit_and_every_missing_byte_is_named_with_its_file(tmp_path):
    run_ranks(save, 2, tmp_path, 2)
    folder = tmp_path / "step-2"

    def look() -> None:
        fill_shards(read_manifest(tmp_path, 2), shards_of_rank(0, 1, 0))

    look()
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for place in range(0, len(data), 13):
            damaged = bytearray(data)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            assert refusal(look).startswith(f"{path} is damaged"), place
        path.write_bytes(data[:-9])
        assert refusal(look).startswith(f"{path} is damaged")
        path.write_bytes(data)
    look()


def test_damage_is_named_by_all_ranks_with_a_way_out_and_no_file_runs_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(save, 2, tmp_path, 1, 2)
    path = tmp_path / "step-2" / "save-2-rank-1.safetensors"
    data = path.read_bytes()

    def refused(cluster: Cluster) -> str:
        return refusal(load_step, Checkpoints(tmp_path, cluster), cluster, 2)

    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    damaged = the_one_sentence(run_ranks(refused, 2))
    torch.save(Evil(), path)
    evil = the_one_sentence(run_ranks(refused, 2))
    path.unlink()
    missing = the_one_sentence(run_ranks(refused, 2))
    for said in (damaged, evil, missing):
        assert said == f"{path} is damaged; remove {path.parent} to resume from an earlier checkpoint"
    shutil.rmtree(path.parent)
    assert run_ranks(load, 2, tmp_path) == [1, 1]
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_checkpoint_of_another_format_or_model_is_refused_by_all_ranks(tmp_path):
    run_ranks(save, 2, tmp_path, 1)
    folder, shards, x = tmp_path / "step-1", shards_of_rank(0, 1, 0.0, 0), full("model/weight", 0)
    cases = [
        (
            [StateShard("model/weight", x[:5]), *shards[1:]],
            "has the shape [6, 12] for model/weight, and this run has the shape [5, 12]",
        ),
        (
            [*shards, StateShard("model/other", x)],
            "it has nothing for model/other, and this run has the shape [6, 12]",
        ),
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


@pytest.mark.parametrize("starts", [(0, 6), (0, 4)])
@on_ranks(2)
def test_shards_that_leave_an_element_out_or_overlap_make_no_checkpoint(cluster: Cluster, starts, tmp_path):
    checkpoints = Checkpoints(tmp_path, cluster)
    shards = [StateShard("model/x", torch.zeros(5), (10,), box=(10,), start=starts[cluster.rank])]
    sentence = refusal(checkpoints.save, 1, shards)
    assert sentence == "the shards of model/x leave out some of its elements, or have some twice"
    assert complete_steps(tmp_path) == []


def test_a_folder_that_another_job_uses_is_refused_and_what_a_killed_job_has_left_goes(tmp_path):
    claim(tmp_path)  # this process is another job
    [said] = set(run_ranks(lambda cluster: refusal(Checkpoints, tmp_path, cluster), 2))
    assert said.startswith(f"another job saves its checkpoints in {tmp_path}: ")
    folder = tmp_path / "own"
    run_ranks(save, 1, folder, 1)
    shutil.copytree(folder / "step-1", folder / "step-2")
    (folder / "step-2" / checkpoint.MANIFEST).unlink()
    (folder / "step-1" / "save-9-rank-0.safetensors").touch()
    (folder / "step-1" / ".tmpHMrD4I").touch()  # what safetensors leaves behind if it is killed
    (folder / "other").touch()
    assert run_ranks(load, 2, folder) == [1, 1]
    assert sorted(os.listdir(folder)) == ["other", "step-1"]
    assert sorted(os.listdir(folder / "step-1")) == ["manifest", "save-1-rank-0.safetensors"]


def test_the_newest_are_those_that_were_completed_last_and_a_stray_folder_is_no_checkpoint():
    """A training goes back to step 100, and trains on from there. Step 300 is saved again."""

    def work(cluster: Cluster, folder: Path) -> list[list[int]]:
        checkpoints, seen = Checkpoints(folder, cluster, keep=2), []
        for number, step in enumerate((100, 200, 300, 120, 140, 300, 300)):
            checkpoints.save(step, shards_of_rank(cluster.rank, 2, number), {"value": number})
            checkpoints.wait()
            assert load_step(checkpoints, cluster, step) == number
            seen.append(complete_steps(folder))
        return seen

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "step-999").mkdir()
        (Path(folder) / "step-999" / "notes").touch()
        kept = [[100], [100, 200], [200, 300], [300, 120], [120, 140], [140, 300], [140, 300]]
        assert run_ranks(work, 2, Path(folder)) == [kept] * 2
        assert sorted(os.listdir(folder)) == ["step-140", "step-300", "step-999"]


class OwnAdam(torch.optim.Optimizer):
    """Has a Python number, a flag and the sums of rows in its state, as a learner's own optimizer may."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["t"], state["has_begun"] = state.get("t", 0) + 1, True
                state["sums"] = state.get("sums", 0.1) * group["betas"][0] + p.grad.sum(-1)
                p -= group["lr"] / state["t"] * state["sums"].unsqueeze(-1) * p.grad


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, 0.1, betas=(0.8, 0.9), amsgrad=True),
    "dampened": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.5),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, 0.1),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, 0.1),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, 0.1),
    "factored": lambda parameters: torch.optim.Adafactor(parameters, 0.1),
    "own": lambda parameters: OwnAdam(parameters, 0.1),
}


def test_an_optimizer_goes_on_with_the_same_bits_at_the_rate_that_its_schedule_had_reached():
    def begin(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).double())
        return model, OPTIMIZERS[kind](model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, p in enumerate(model.parameters()):
            p.grad = torch.linspace(-1, number + 1, p.numel()).view_as(p).to(p.dtype)
        optimizer.step()

    def work(cluster: Cluster, folder: str) -> None:
        checkpoints = Checkpoints(folder, cluster)
        for kind in OPTIMIZERS:
            model, optimizer = begin(kind)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for _ in range(3):
                train(model, optimizer)
                schedule.step()
            checkpoints.save(3, plain_shards(model, optimizer))
            train(model, optimizer)
            again, its_optimizer = begin(kind)
            train(again, its_optimizer)  # what it has of its own must not remain
            checkpoints.load(3, plain_shards(again, its_optimizer))
            assert its_optimizer.param_groups[0]["lr"] == 0.05, kind
            train(again, its_optimizer)
            assert state_digest(again.state_dict()) == state_digest(model.state_dict()), kind

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(work, 1, folder)


@on_ranks(2)
def test_an_optimizer_whose_state_would_be_lost_is_refused_when_it_is_saved(cluster: Cluster, tmp_path):
    model = torch.nn.Linear(3, 2)
    masters = [torch.nn.Parameter(parameter.detach().double()) for parameter in model.parameters()]
    sharded = ZeroOptimizer(torch.nn.Linear(3, 2).parameters(), torch.optim.SGD)
    for optimizer in (torch.optim.SGD(masters, 0.1), sharded):
        assert "would not have its state" in refusal(plain_shards, model, optimizer)
    adam = torch.optim.Adam(model.parameters())
    checkpoints = Checkpoints(tmp_path, cluster)
    adam.state[model.weight]["history"] = [torch.zeros(3)]
    assert "the state 'history' of Adam" in refusal(checkpoints.save, 1, plain_shards(model, adam))
    adam.state[model.weight]["history"] = torch.zeros(7)
    divided = trained_shards("weight", model.weight, adam, shape=(4, 3), offset=(2 * cluster.rank, 0))
    assert "the state 'history' of Adam" in refusal(checkpoints.save, 1, divided)


@on_ranks(2)
def test_shards_of_which_ranks_have_different_values_make_no_checkpoint(cluster: Cluster):
    x = torch.zeros(5, dtype=torch.complex64)
    x[3] = complex(1.0, 0.5 + cluster.rank * 2**-24)  # another last bit
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.full((3,), 1.0 + cluster.rank)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as own_folder:
        checkpoints = Checkpoints(exchange(own_folder)[0], cluster)
        with pytest.raises(WorkbookError, match="different values of model/x"):
            checkpoints.save(1, [StateShard("model/x", x)])
        with pytest.raises(WorkbookError, match="different values of optimizer/"):
            checkpoints.save(1, plain_shards(model, optimizer))
        dist.barrier()


@on_ranks(2)
def test_state_that_one_rank_has_from_some_step_on_is_saved_from_then_on(cluster: Cluster, tmp_path):
    block = torch.nn.Linear(3, 3)
    optimizer, checkpoints = torch.optim.AdamW(block.parameters()), Checkpoints(tmp_path, cluster)
    for step in range(2):
        if step and cluster.rank:
            block(torch.ones(3)).sum().backward()
            optimizer.step()
        own = [trained_shards(f"{cluster.rank}.{name}", p, optimizer) for name, p in block.named_parameters()]
        checkpoints.save(step, [shard for shards in own for shard in shards])
    checkpoints.wait()
    assert [len(checkpoints.find(step).tensors) for step in range(2)] == [4, 10]


@on_ranks(3)
def test_buffers_are_those_of_one_rank_that_the_state_dict_has_and_may_be_infinite(
    cluster: Cluster, tmp_path
):
    model = torch.nn.Module()
    for name in ("mean", "var", "count"):
        model.register_buffer(name, torch.full((2,), float(cluster.rank)))
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    model.register_buffer("cache", torch.zeros(9 + cluster.rank), persistent=False)
    save_once(cluster, tmp_path, buffer_shards(model)).load(1, buffer_shards(model))
    assert [buffer[0].item() for buffer in model.state_dict().values()] == [0, 0, 0, -torch.inf]


@on_ranks(1)
def test_a_model_whose_dtype_changes_between_two_saves_is_saved_in_the_new_one(cluster: Cluster, tmp_path):
    checkpoints, third = Checkpoints(tmp_path, cluster), torch.tensor([1 / 3], dtype=torch.complex128)
    for x in (third.real.bfloat16(), third.real.float(), third.real, third):
        checkpoints.save(1, [StateShard("model/x", x)])
        loaded = torch.zeros_like(x)
        checkpoints.load(1, [StateShard("model/x", loaded)])
        assert torch.equal(loaded, x)


def test_a_disk_that_hangs_on_one_rank_is_waited_for_no_longer_than_a_peer(tmp_path):
    def work(cluster: Cluster) -> str:
        checkpoints = Checkpoints(tmp_path, cluster)
        with mock.patch.object(checkpoint, "write_tensors", lambda *_: time.sleep(8 * cluster.rank)):
            checkpoints.save(1, [StateShard(f"model/{cluster.rank}", torch.ones(3))])
            return refusal(checkpoints.wait)

    said = run_ranks(work, 2, group_timeout=1.0, timeout=30)
    assert said[0] == "cannot save a checkpoint: another rank has not answered in time"

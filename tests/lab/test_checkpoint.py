import errno
import fcntl
import hashlib
import io
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lab.checkpoint import claim, read, save, seal, unpack
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP
from lab.ranks import run_ranks
from tests.evil import Evil


def trained() -> dict[str, Any]:
    """Return the state of a short training, with an optimizer that has a state."""
    model = MLP([8, 16, 4])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        optimizer.step()
    return {"step": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


def bitwise_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(bitwise_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(bitwise_equal, a, b))
    return type(a) is type(b) and a == b


def assert_only(directory: Path, step: int) -> None:
    """Assert that the directory holds the checkpoint of that step and nothing else."""
    assert os.listdir(directory) == ["checkpoint.pt"]
    assert unpack(read(directory), "it")["step"] == step


def test_model_and_optimizer_come_back_bit_for_bit(tmp_path):
    state = trained()
    path = save(tmp_path / "runs" / "first", state)
    assert path == tmp_path / "runs" / "first" / "checkpoint.pt" and path.is_file()
    assert bitwise_equal(unpack(read(path.parent), "it"), state)


def test_what_comes_back_fits_an_optimizer_which_goes_on_as_if_nothing_had_happened(tmp_path):
    save(tmp_path, trained())
    state = unpack(read(tmp_path), "it")
    model = MLP([8, 16, 4], seed=9)
    model.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(state["optimizer"])
    assert bitwise_equal(optimizer.state_dict(), trained()["optimizer"])


def test_a_newer_checkpoint_takes_the_place_of_the_older(tmp_path):
    for step in (1, 2):
        save(tmp_path, {"step": step})
    assert_only(tmp_path, step=2)


def test_what_a_killed_save_left_behind_does_not_stay(tmp_path):
    save(tmp_path, {"step": 1})
    (tmp_path / "checkpoint.pt.partial").write_bytes(b"the first half")
    save(tmp_path, {"step": 2})
    assert_only(tmp_path, step=2)


def test_the_file_is_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, f=original: (calls.append(n), f(*a)))
    save(tmp_path, {"step": 1})
    assert calls == ["fsync", "replace"]


@pytest.mark.parametrize(
    "value", [lambda: 0, io.BytesIO(), np.float64(1.5), Path()], ids=lambda value: type(value).__name__
)
def test_what_unpack_would_refuse_is_not_saved_and_the_old_checkpoint_stays(tmp_path, value):
    save(tmp_path, {"step": 1})
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        save(tmp_path, {"step": 2, "weights": torch.zeros(100_000), "value": value})
    assert_only(tmp_path, step=1)


def test_a_save_that_cannot_take_the_name_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    save(tmp_path, {"step": 1})
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WorkbookError, match=f"{tmp_path}.*Permission denied"):
        save(tmp_path, {"step": 2})
    assert_only(tmp_path, step=1)


def test_ctrl_c_in_the_middle_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    save(tmp_path, {"step": 1})
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, {"step": 2})
    assert_only(tmp_path, step=1)


@pytest.mark.parametrize("room", [0, 500, 100_000])
def test_without_room_for_the_file_the_sentence_says_so_and_the_old_checkpoint_stays(tmp_path, room):
    save(tmp_path, {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(WorkbookError) as caught:
            save(tmp_path, {"step": 2, "weights": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in str(caught.value) and "File too large" in str(caught.value)
    assert_only(tmp_path, step=1)


def test_a_folder_is_one_jobs_as_long_as_it_lives_and_nothing_of_another_is_mixed_in(tmp_path):
    def work(cluster: Cluster) -> str:
        refused = ""
        if cluster.rank == 1:
            claim(tmp_path)
            claim(tmp_path)  # its own claim is no obstacle
            save(tmp_path, {"step": 1})
            (tmp_path / "checkpoint.pt.partial-01").write_bytes(b"as if it were being written")
        dist.barrier()
        if cluster.rank == 0:
            with pytest.raises(WorkbookError) as caught:
                save(tmp_path, {"step": 2})
            refused = str(caught.value)
            assert (tmp_path / "checkpoint.pt.partial-01").read_bytes() == b"as if it were being written"
            assert unpack(read(tmp_path), "it")["step"] == 1
        dist.barrier()
        return refused

    refused, _ = run_ranks(work, 2)
    assert refused.startswith(f"another job saves its checkpoints in {tmp_path}: choose another folder")
    save(tmp_path, {"step": 3})  # both have ended
    assert_only(tmp_path, step=3)


def test_where_folders_cannot_be_locked_two_jobs_files_have_names_of_their_own(tmp_path, monkeypatch):
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    names = []
    replace = os.replace
    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr(os, "replace", lambda old, new: (names.append(old), replace(old, new)))
    save(tmp_path, {"step": 1})
    save(tmp_path, {"step": 2})
    assert len(set(names)) == 2
    assert_only(tmp_path, step=2)


def test_a_file_in_the_place_of_the_directory_is_named_and_left_alone(tmp_path):
    (tmp_path / "runs").write_text("mine")
    for directory in (tmp_path / "runs", tmp_path / "runs" / "first"):
        with pytest.raises(WorkbookError, match=str(directory)):
            save(directory, {"step": 1})
        with pytest.raises(WorkbookError, match=f"no checkpoint in {directory} to resume from"):
            read(directory)
    assert (tmp_path / "runs").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(WorkbookError, match=f"{tmp_path}.*Permission denied"):
        save(tmp_path, {"step": 1})


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_where_there_is_no_checkpoint_the_sentence_names_the_directory(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkbookError, match=f"There is no checkpoint in {tmp_path / name} to resume from"):
        read(tmp_path / name)


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "checkpoint.pt").mkdir()
    with pytest.raises(WorkbookError, match=f"cannot read the checkpoint {tmp_path / 'checkpoint.pt'}"):
        read(tmp_path)


def test_every_flipped_bit_is_noticed_and_the_file_is_named(tmp_path):
    save(tmp_path, trained())
    data = bytearray(read(tmp_path))
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        with pytest.raises(WorkbookError, match=r"^runs/first is damaged, or is no checkpoint"):
            unpack(bytes(data), "runs/first")
        data[place] ^= 1 << place % 8
    assert bitwise_equal(unpack(bytes(data), "it"), trained())


def test_torch_itself_loads_the_file_for_all_that_stands_at_its_end(tmp_path):
    path = save(tmp_path, trained())
    for mmap in (False, True):
        assert bitwise_equal(torch.load(path, weights_only=True, mmap=mmap), trained())


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, kept):
    save(tmp_path, trained())
    data = read(tmp_path)
    with pytest.raises(WorkbookError, match="runs/first is damaged"):
        unpack(data[: int(kept * len(data))], "runs/first")


def saved_by_torch(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def sealed(data: bytes) -> bytes:
    """Return data with a valid last line, as another program could have written it."""
    return data + seal(hashlib.sha256(data))


FOREIGN = {
    "text": b"not a checkpoint\n" * 100,
    "zeros": bytes(1000),
    "a pickle": pickle.dumps(Evil()),
    "an archive": saved_by_torch({"a": Evil()}),
    "an old archive": saved_by_torch({"a": Evil()}, _use_new_zipfile_serialization=False),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("finish", [bytes, sealed])
@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_file_is_refused_by_name_and_runs_no_code(tmp_path, monkeypatch, data, finish):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkbookError, match="runs/first is damaged, or is no checkpoint"):
        unpack(finish(data), "runs/first")
    assert os.listdir(tmp_path) == []


def test_a_file_of_something_other_than_a_state_is_refused_by_name():
    with pytest.raises(WorkbookError, match="runs/first holds a Tensor"):
        unpack(sealed(saved_by_torch(torch.zeros(3))), "runs/first")

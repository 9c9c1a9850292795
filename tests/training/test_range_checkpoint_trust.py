"""A checkpoint's files run no code, and lead to no file outside of its folder."""

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from lab import checkpoint
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.evil import Evil
from tests.training.range_items import NUMEL, load, refusal, save, the_one
from training.range_checkpoint import FILES, METADATA

STRANGE = {
    "code": pickle.dumps(Evil()),
    "code inside": pickle.dumps(Metadata({}, storage_data=Evil())),
    "code by a dotted name": b"\x80\x04\x8c\x05torch\x8c\x08os.abort\x93)R.",
    "objects DCP would unpickle": pickle.dumps(Metadata({"cut": BytesStorageMetadata()}, storage_data={})),
    "another thing": pickle.dumps(3),
    "no pickle": b"text",
}


def forge(path: Path, data: bytes) -> None:
    """Put other data into a file of the checkpoint, and its checksum into the header."""
    path.write_bytes(data)
    header = checkpoint.unpack(checkpoint.read(path.parent), "")
    header[FILES][path.name] = hashlib.sha256(data).hexdigest()
    checkpoint.write(path.parent, header)


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE.keys())
def test_metadata_that_would_run_code_is_refused_and_does_not(tmp_path, data):
    run_ranks(save, 1, tmp_path, 1.0)
    forge(tmp_path / "checkpoint-1" / METADATA, data)

    def work(cluster: Cluster) -> str:
        os.chdir(tmp_path)
        return refusal(load, cluster, tmp_path)

    assert METADATA in the_one(run_ranks(work, 1))
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_a_file_of_tensors_that_holds_something_else_is_refused_and_runs_no_code(tmp_path):
    run_ranks(save, 1, tmp_path, 1.0)
    path = tmp_path / "checkpoint-1" / "__0_0.distcp"
    size = path.stat().st_size

    def work(cluster: Cluster) -> str:
        os.chdir(tmp_path)
        return refusal(load, cluster, tmp_path)

    for data in (bytes(size), pickle.dumps(Evil(), protocol=2).ljust(size), b"short"):
        forge(path, data)
        assert f"cannot load the checkpoint {path.parent}" in the_one(run_ranks(work, 1))
    assert os.listdir(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("name", ["../secret", "secret"])
def test_metadata_that_points_out_of_the_folder_is_refused(tmp_path, name):
    run_ranks(save, 1, tmp_path, 1.0)
    path = tmp_path / "checkpoint-1" / METADATA
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = str(tmp_path / name)
    (tmp_path / "secret").write_bytes((path.parent / "__0_0.distcp").read_bytes())
    forge(path, pickle.dumps(metadata))
    assert "secret" in the_one(run_ranks(lambda cluster: refusal(load, cluster, tmp_path), 1))


HEADERS: list[Any] = [{}, {FILES: 3}, {FILES: {}}, {FILES: {METADATA: 3}}, {FILES: {METADATA: "", 3: 4}}]


def test_a_header_that_says_something_else_is_refused_in_a_sentence(tmp_path):
    run_ranks(save, 2, tmp_path, 1.0)
    folder = tmp_path / "checkpoint-1"
    whole = checkpoint.unpack(checkpoint.read(folder), "")
    away = {FILES: {**whole[FILES], "../../elsewhere": whole[FILES][METADATA]}}

    def work(cluster: Cluster) -> list[str]:
        said = []
        for header in (*HEADERS, away):
            if cluster.is_main:
                checkpoint.write(folder, header)
            dist.barrier()
            said.append(refusal(load, cluster, tmp_path))
            dist.barrier()
        return said

    for texts in zip(*run_ranks(work, 2), strict=True):
        assert str(tmp_path) in the_one(list(texts))


def test_what_is_written_is_a_checkpoint_that_pytorch_reads(tmp_path):
    run_ranks(save, 3, tmp_path, 1.0)

    def work(_: Cluster) -> dict[str, Tensor]:
        state = {"cut": torch.zeros(NUMEL), "whole": torch.zeros(2, 2)}
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint-1")
        return state

    [state] = run_ranks(work, 1)
    assert torch.equal(state["cut"], 1.0 + torch.arange(NUMEL))
    assert torch.equal(state["whole"], torch.ones(2, 2))

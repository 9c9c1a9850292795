"""A rank computes with its share of the cores that the machine, or its container, gives it."""

from pathlib import Path

import pytest

from lab.launch import threads


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, float("inf")),
        ({}, float("inf")),
    ],
)
def test_a_containers_limit_is_read(files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(threads, "CGROUP", Path(tmp_path))
    assert threads.core_limit() == cores

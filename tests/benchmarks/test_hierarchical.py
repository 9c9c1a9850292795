"""The benchmark of two hosts refuses where it cannot make them, and leaves no namespace behind."""

import subprocess
from typing import Any

import pytest

from benchmarks import hierarchical
from benchmarks.hierarchical import Args, bytes_between_hosts, main, rows_of, two_hosts


@pytest.mark.parametrize(("user", "program"), [(1000, "/sbin/ip"), (0, None)])
def test_it_needs_root_and_its_programs(monkeypatch: pytest.MonkeyPatch, user: int, program: str | None):
    monkeypatch.setattr("os.geteuid", lambda: user, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: program)
    with pytest.raises(SystemExit, match="run it as root on Linux, with ip and tc"):
        main(Args())


def test_namespaces_are_removed_if_a_command_fails(monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []

    def run(command: list[str], **others: Any) -> subprocess.CompletedProcess:
        commands.append(command)
        fails = command[0] == "tc" or command[:3] == ["ip", "netns", "delete"]
        return subprocess.CompletedProcess(command, int(fails), "", "Operation not permitted\n")

    monkeypatch.setattr(hierarchical.subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"`tc .*` failed: Operation not permitted$"):
        with two_hosts():
            raise AssertionError("there are no hosts")
    added = [command[3] for command in commands if command[:3] == ["ip", "netns", "add"]]
    deleted = [command[3] for command in commands if command[:3] == ["ip", "netns", "delete"]]
    assert len(set(added)) == 3 and deleted == added


def test_rows_compare_seconds_and_bytes_with_each_other_pattern():
    result = {name: {"seconds": 2.0, "bytes": 6.0} for name in hierarchical.PATTERNS}
    result["hierarchical"] = {"seconds": 1.0, "bytes": 2.0}
    rows = rows_of(" interleaved", result, 16)
    assert [(each["against"], each["unit"], each["ratio"]) for each in rows[:1] + rows[-1:]] == [
        ("ring interleaved", "s", 0.5),
        ("torch interleaved", "bytes", 2 / 6),
    ]


def test_by_formula_hosts_send_two_thirds_of_a_rings_bytes_or_a_third_if_its_ranks_are_interleaved():
    for name, ratio in (("", 2 / 3), (" interleaved", 1 / 3)):
        placement = hierarchical.PLACEMENTS[name]
        sent = [bytes_between_hosts(pattern, placement) for pattern in ("hierarchical", "ring")]
        assert sent[0] / sent[1] == pytest.approx(ratio)

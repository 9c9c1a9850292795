"""Test what `docker-compose up` makes of the lessons, the nodes and their links."""

import json
import math
import time
from collections.abc import Iterator

import pytest

from tests.containers.conftest import (
    IMAGE,
    NAME,
    Node,
    Up,
    compose,
    containers,
    docker,
    inspected,
    outcome,
    remove_containers,
)
from tests.processes import listed
from tests.run_modes import MODES, few_steps

DOCKERS_NAME_SERVER = "127.0.0.11"
NODES = ["node0", "node1", "node2", "node3"]
RATE, MIB = 200e6 / 8, 1 << 20  # bytes per second of the shaped link
BURST = 256 << 10  # bytes that it lets through at once after a pause (entrypoint.sh)


@pytest.fixture(scope="module")
def tour(up: Up) -> dict[str, Node]:
    """All collectives on 4 nodes whose links carry 200 Mbit/s."""
    return up(RUN_MODE="comm", LINK="200mbit", ARGS="--json --mb 8 --repeats 1", timeout=300)


def exit_codes(nodes: dict[str, Node]) -> dict[str, int]:
    return {name: node.exit_code for name, node in sorted(nodes.items())}


def test_the_tour_of_the_collectives_ends_well_on_all_nodes(tour):
    assert exit_codes(tour) == dict.fromkeys(NODES, 0), tour
    figures = tour["node0"].json()
    assert (figures["run_mode"], figures["world_size"]) == ("comm", 4)
    assert {"broadcast", "all_gather", "reduce_scatter", "all_reduce"} <= {
        row["op"] for row in figures["rows"]
    }


def test_a_shaped_link_lets_a_ring_all_reduce_through_at_its_rate_and_no_faster(tour):
    rows = tour["node0"].json()["rows"]
    [ring] = [row for row in rows if (row["op"], row["pattern"]) == ("all_reduce", "ring")]
    assert ring["bytes"] == 8 * MIB
    sent = 2 * 3 / 4 * ring["bytes"]
    assert (sent - BURST) / RATE <= ring["seconds"] <= 1.4 * sent / RATE


def test_what_we_count_is_what_leaves_the_interface(tour):
    ours = [
        row for row in tour["node0"].json()["rows"] if row["pattern"] != "torch" and row["bytes_sent"] > MIB
    ]
    assert len(ours) > 5
    for row in ours:
        assert row["interface_bytes"] == pytest.approx(row["bytes_sent"], rel=0.05), row


def test_bucket_overlap_trains_on_four_nodes_and_hides_communication_on_a_slow_link(up):
    args = "--json --steps 20 --batch-size 48 --bucket-mb 0.5"
    nodes = up(RUN_MODE="data_parallel_bucket_overlap", LINK="200mbit", ARGS=args, timeout=240)
    assert exit_codes(nodes) == dict.fromkeys(NODES, 0), nodes
    figures = nodes["node0"].json()
    assert (figures["run_mode"], figures["world_size"]) == ("data_parallel_bucket_overlap", 4)
    assert figures["last_loss"] < 0.8 * figures["first_loss"]
    assert figures["replicas_equal"] is True
    assert figures["bytes_sent"] == figures["bytes_formula"]
    assert figures["hidden_share"] > 0.1


def test_a_checkpoint_in_shards_is_on_a_disk_that_all_nodes_share_and_other_nodes_go_on_from_it(up):
    def run(nodes: list[str], args: str) -> dict[str, float]:
        settings = {"RUN_MODE": "zero3", "WORLD_SIZE": str(len(nodes))}
        ended = up(*nodes, **settings, ARGS=f"--json --size tiny {args}", timeout=240)
        assert exit_codes(ended) == dict.fromkeys(nodes, 0), ended
        return ended["node0"].json()

    assert run(NODES, "--steps 3 --checkpoint checkpoints/z")["steps"] == 3
    rest = run(NODES[:3], "--steps 6 --checkpoint checkpoints/z --resume")
    assert rest["steps"] == 3
    assert rest["last_loss"] == pytest.approx(run(NODES[:1], "--steps 6")["last_loss"], rel=1e-4)


def test_every_lesson_runs_with_its_defaults_on_four_nodes(up):
    modes = "\n".join(f"{mode} {' '.join(few_steps(mode))} --json" for mode, _, _ in MODES)
    files = "docker-compose.yaml:tests/containers/every_mode.yaml"
    nodes = up(COMPOSE_FILE=files, MODES=modes, timeout=1800)
    assert exit_codes(nodes) == dict.fromkeys(NODES, 0), nodes
    reports = [json.loads(line) for line in nodes["node0"].stdout.splitlines() if line.startswith("{")]
    assert [(one["run_mode"], one["world_size"]) for one in reports] == [(mode, 4) for mode, _, _ in MODES]
    for one in reports:
        if one["run_mode"] not in ("comm", "point_to_point"):
            assert one["steps"] == 1 and math.isfinite(one["last_loss"]), one
            assert one["replicas_equal"] is (one["run_mode"] != "train"), one


def test_six_nodes_train_where_the_profile_starts_eight(up):
    args = "--json --steps 3 --size tiny"
    nodes = up(
        COMPOSE_PROFILES="more", WORLD_SIZE="6", RUN_MODE="data_parallel_naive", ARGS=args, timeout=240
    )
    assert exit_codes(nodes) == dict.fromkeys([f"node{i}" for i in range(8)], 0), nodes
    report = nodes["node0"].json()
    assert (report["world_size"], report["replicas_equal"]) == (6, True)
    assert all(f"node{i} is not needed" in nodes[f"node{i}"].stderr for i in (6, 7))


def test_more_ranks_than_nodes_are_refused_with_the_profile_that_has_them(up):
    nodes = up(WORLD_SIZE="6", RUN_MODE="data_parallel_naive")
    assert exit_codes(nodes) == dict.fromkeys(NODES, 2), nodes
    assert "COMPOSE_PROFILES=more" in nodes["node0"].stderr


def test_the_software_link_agrees_with_a_shaped_one_of_the_same_rate(up):
    args = "--json --steps 5 --size 13m --batch-size 2 --metronome 20ms"
    settings = {"RUN_MODE": "data_parallel_bucket_overlap", "WORLD_SIZE": "2"}
    shaped = up(**settings, LINK="200mbit", ARGS=args)["node0"].json()
    modelled = up(**settings, ARGS=f"{args} --link 200mbit")["node0"].json()
    for figure in ("communication_seconds", "step_seconds"):
        assert modelled[figure] == pytest.approx(shaped[figure], rel=0.15)


def test_delay_is_there_or_said_not_to_be(up):
    nodes = up(RUN_MODE="point_to_point", WORLD_SIZE="2", LINK_DELAY="5ms", ARGS="--json")
    assert exit_codes(nodes) == dict.fromkeys(NODES, 0), nodes
    if "delay is not available" not in nodes["node0"].stderr:
        assert nodes["node0"].json()["alpha_seconds"] >= 5e-3


@pytest.fixture(scope="module")
def killed(up: Up) -> Iterator[tuple[dict[str, set[str]], dict[str, Node]]]:
    """Return the addresses on which nodes listen while they train, and their ends after node2 was killed."""
    args = "--steps 100000 --size tiny"
    try:
        compose("up", "--detach", timeout=120, env={"RUN_MODE": "data_parallel_naive", "ARGS": args})
        ids = containers()
        deadline = time.monotonic() + 120
        while not any("step 1/" in docker("logs", node).stdout for node in ids):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        foreign = {container["Name"]: addresses_beside_its_own(container) for container in inspected(ids)}
        docker("kill", f"{NAME}_node2_1")
        docker("wait", *ids)
        yield foreign, dict(outcome(container) for container in inspected(ids))
    finally:
        remove_containers()


def addresses_beside_its_own(container: dict) -> set[str]:
    """Return the addresses on which a node listens, without that of the nodes' network."""
    (network,) = container["NetworkSettings"]["Networks"].values()
    table = docker("exec", container["Id"], "cat", "/proc/net/tcp", "/proc/net/tcp6").stdout
    addresses = {address for address, _, _ in listed(table)}
    assert network["IPAddress"] in addresses
    return addresses - {network["IPAddress"]}


def test_every_node_listens_in_the_network_of_the_nodes_only(killed):
    foreign, _ = killed
    assert list(foreign.values()) == [{DOCKERS_NAME_SERVER}] * len(NODES), foreign


def test_after_a_node_is_killed_all_others_name_it_and_what_they_were_doing(killed):
    _, nodes = killed
    for name in ("node0", "node1", "node3"):
        assert nodes[name].exit_code == 1
        [sentence] = [line for line in nodes[name].stderr.splitlines() if "has died" in line]
        assert "(ring)" in sentence and sentence.endswith(
            "rank 2 has died, so look for the first error in its log."
        )
        assert "Traceback" not in nodes[name].stderr


def test_nothing_in_a_container_runs_as_root(up):
    script = "id -u; grep CapEff /proc/self/status"
    user, capabilities = docker("run", "--rm", "--entrypoint", "sh", IMAGE, "-c", script).stdout.splitlines()
    assert int(user) != 0
    assert int(capabilities.split()[1], 16) == 0

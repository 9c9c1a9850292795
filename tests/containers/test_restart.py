"""A node that is killed and started again joins the others, and training continues."""

import re
import time

from tests.containers.conftest import NAME, Up, compose, docker, remove_containers

ARGS = (
    "--tensor 2 --size tiny --steps 1000000 --checkpoint checkpoints/run --checkpoint-every 5 --auto-resume"
)


def log(node: str) -> str:
    said = docker("logs", f"{NAME}_{node}_1")
    return said.stdout + said.stderr


def wait_for(node: str, pattern: str, times: int = 1) -> list[str]:
    """Return what the pattern has found in a node's log, once it is there so many times."""
    deadline = time.monotonic() + 60
    while len(found := re.findall(pattern, log(node))) < times:
        assert time.monotonic() < deadline, log("node0") + log("node1")
        time.sleep(0.2)
    return found


def saved() -> int:
    """Return the step of the newest complete checkpoint, as a node sees it."""
    files = docker("exec", f"{NAME}_node0_1", "sh", "-c", "ls checkpoints/run/step-*/manifest", check=False)
    return max(map(int, re.findall(r"step-(\d+)/manifest", files.stdout)), default=0)


def test_a_killed_node_is_started_again_and_training_goes_on_by_itself(up: Up):
    settings = {"RESTART": "on-failure", "RUN_MODE": "hybrid", "WORLD_SIZE": "2", "ARGS": ARGS}
    kept = 0
    try:
        compose("up", "--detach", timeout=120, env=settings)
        for times, (victim, other) in enumerate([("node1", "node0"), ("node0", "node1")], start=1):
            deadline = time.monotonic() + 60
            while (before := saved()) < kept + 10:
                assert time.monotonic() < deadline, log("node0")
                time.sleep(0.2)
            docker("kill", f"{NAME}_{victim}_1")
            waiting = "still waiting for rank 1" if other == "node0" else "still waiting for node0:29500"
            wait_for(other, waiting)
            assert "Traceback" not in log(other)
            docker("start", f"{NAME}_{victim}_1")
            went_on = wait_for("node0", r"training continues after step (\d+) of 1000000", times)
            kept = int(went_on[-1])
            assert kept >= before
        wait_for("node0", r"step (\d+)/1000000 +loss", 6)
    finally:
        remove_containers()


def test_nodes_train_on_without_a_killed_one_and_it_joins_them_when_it_is_started_again(up: Up):
    args = "--size tiny --sync-every 4 --steps 1000000"
    settings = {"RUN_MODE": "diloco_elastic", "WORLD_SIZE": "3", "ARGS": args}
    try:
        compose("up", "--detach", timeout=120, env=settings)
        wait_for("node0", r"step \d+/1000000 +loss")
        docker("kill", f"{NAME}_node2_1")
        wait_for("node0", "lost rank 2; 2 ranks go on")
        docker("start", f"{NAME}_node2_1")
        wait_for("node0", "rank 2 is back; 3 ranks go on")
        docker("kill", f"{NAME}_node0_1")
        for node in ("node1", "node2"):
            wait_for(node, "rank 0 has died, and the others cannot go on without it")
        assert "Traceback" not in log("node1") + log("node2")
    finally:
        remove_containers()

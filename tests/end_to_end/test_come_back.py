"""The launcher starts a worker again that was killed, and the worker joins the others."""

import json
import os
import re
import subprocess
import sys

from tests.run_modes import ROOT

# Rank 0 waits for the worker when it synchronises: so the run is short, but does not end before it is back.
SCRIPT = """
import time
from comm.membership.survivors import Survivors
from comm.script import start
from low_communication import train_elastic_diloco

check = Survivors.check

def wait_and_check(survivors, may_join):
    while may_join and len(survivors.names) == 1 and not survivors.coordinator.newcomers():
        time.sleep(0.05)
    check(survivors, may_join)

Survivors.check = wait_and_check
start(train_elastic_diloco.main, train_elastic_diloco.ElasticDiLoCoArgs, in_a_child=True)
"""


def test_a_worker_is_back_a_second_after_its_death_and_all_end_with_the_same_parameters(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = "--size tiny --batch-size 8 --steps 16 --sync-every 4 --kill 1@6 --come-back 1 --json"
    launch = [sys.executable, "-m", "lab.launch.torchrun", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launch, *options.split()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    [report] = map(json.loads, done.stdout.splitlines())
    assert (report["run_mode"], report["survivors"], report["joins"]) == ("diloco_elastic", [0, 1], 1)
    assert report["replicas_equal"] is True
    events = re.findall(r"rank 1 was killed|lost rank 1; 1 rank|rank 1 is back; 2 ranks", done.stderr)
    assert events == ["rank 1 was killed", "lost rank 1; 1 rank", "rank 1 is back; 2 ranks"], done.stderr

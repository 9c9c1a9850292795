"""The workflows of GitHub, and the container of its Codespaces, call targets of the Makefile."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.run_modes import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def targets_of(job: dict, command: str) -> list[str]:
    """Return the targets that a step makes: of each job of the matrix, where it names one."""
    named = re.fullmatch(r"make (.+)", command)
    assert named, command
    return job["strategy"]["matrix"]["target"] if named[1] == "${{ matrix.target }}" else named[1].split()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_with_few_rights_and_a_limit(path: Path):
    flow = yaml.load(path.read_text(), yaml.BaseLoader)  # or the key `on` would be True
    assert flow.keys() <= {"name", "on", "permissions", "concurrency", "jobs"}
    assert set(flow["on"]) <= {"push", "pull_request", "workflow_dispatch"}
    assert flow["permissions"]["contents"] == "read"
    for job in flow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys()
        for step in job["steps"]:
            assert step.keys() <= {"id", "uses", "run", "with", "env"} and ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
            else:
                assert set(targets_of(job, step["run"])) <= TARGETS


def test_every_push_is_linted_and_tested_with_its_notebooks_and_the_site_as_on_one_machine():
    [job] = yaml.load((ROOT / ".github/workflows/check.yml").read_text(), yaml.BaseLoader)["jobs"].values()
    made = [target for step in job["steps"] if "run" in step for target in targets_of(job, step["run"])]
    assert {"lint", "test", "check-notebooks", "check-site"} <= set(made)
    on_one_machine = set(re.findall(r"\btimed ([a-z-]+)", (ROOT / ".ci" / "run").read_text()))
    assert on_one_machine == {"setup", *made}


def test_a_codespace_is_set_up_by_make_and_its_editor_takes_this_environment():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["image"].endswith("/python:3.11") and container["postCreateCommand"] == "make setup"
    settings = container["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"] == "${containerWorkspaceFolder}/.venv/bin/python"

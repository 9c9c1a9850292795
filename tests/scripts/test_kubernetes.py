"""scripts/kubernetes.yaml is valid, fits the image, and its command trains, is evicted and continues."""

import signal

import pytest

from lab.launch.errors import Stopped
from tests.scripts.kubernetes import ROOT, errors_of, objects

OBJECTS = objects()
JOB, SERVICE, POLICY = (OBJECTS[kind] for kind in ("Job", "Service", "NetworkPolicy"))
SPEC = JOB["spec"]
POD = SPEC["template"]["spec"]
[CONTAINER] = POD["containers"]


@pytest.mark.parametrize("kind", OBJECTS)
def test_every_field_is_one_of_the_api_and_has_its_type(kind):
    versions = {"Job": "batch/v1", "Service": "v1", "NetworkPolicy": "networking.k8s.io/v1"}
    assert OBJECTS[kind]["apiVersion"] == versions[kind]
    assert errors_of(OBJECTS[kind], kind) == []


def test_the_pods_have_the_names_under_which_they_look_for_each_other():
    labels = SPEC["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    assert POLICY["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["clusterIP"] == "None" and SERVICE["spec"]["publishNotReadyAddresses"] is True
    first = f"{JOB['metadata']['name']}-0.{SERVICE['metadata']['name']}"
    assert f"--master-addr={first}" in CONTAINER["args"]
    assert SPEC["completionMode"] == "Indexed"
    assert SPEC["completions"] == SPEC["parallelism"]
    assert f"--nnodes={SPEC['completions']}" in CONTAINER["args"]


def test_the_containers_run_without_root_and_write_only_to_their_volumes():
    assert POD["securityContext"]["runAsNonRoot"] is True and POD["securityContext"]["runAsUser"] > 0
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes
    mounted = [mount["mountPath"] for mount in CONTAINER["volumeMounts"]]
    assert "WORKDIR /workbook\n" in (ROOT / "Dockerfile").read_text()
    assert "/workbook/checkpoints" in mounted and "--checkpoint=checkpoints/workbook" in CONTAINER["args"]


def test_a_pod_that_saved_and_stopped_is_no_failure_and_a_wrong_command_line_is_not_tried_again():
    rules = {
        rule["action"]: rule["onExitCodes"]
        for rule in SPEC["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert {rule["containerName"] for rule in rules.values()} == {CONTAINER["name"]}
    by_sigterm = 128 + signal.SIGTERM  # of the launcher
    assert rules["Ignore"]["values"] == [Stopped.BY_SCHEDULER, Stopped.BY_USER, by_sigterm]
    assert rules["FailJob"]["values"] == [2]
    assert POD["restartPolicy"] == "Never"  # only then a policy is allowed
    [timeout] = (int(arg.partition("=")[2]) for arg in CONTAINER["args"] if "--shutdown-timeout" in arg)
    assert timeout < POD["terminationGracePeriodSeconds"]

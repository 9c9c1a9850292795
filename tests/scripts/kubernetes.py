"""Read scripts/kubernetes.yaml as the API server does, and make of it what a kubelet starts."""

import copy
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
FIELDS = yaml.safe_load((Path(__file__).parent / "kubernetes_fields.yaml").read_text())
PLAIN = {"str": str, "int": int, "bool": bool}


def objects() -> dict[str, dict[str, Any]]:
    """Return the objects of the file by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((ROOT / "scripts/kubernetes.yaml").read_text())}


def errors_of(value: Any, kind: str, where: str = "") -> list[str]:
    """Return what the API server refuses in strict validation: unknown fields, and values of another type."""
    if items := re.fullmatch(r"List\[(.+)\]", kind):
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [error for n, item in enumerate(value) for error in errors_of(item, items[1], f"{where}[{n}]")]
    if kind.startswith("Dict[str,"):
        is_right = isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values())
        return [] if is_right else [f"{where}: no map of strings"]
    if kind in PLAIN:
        return [] if type(value) is PLAIN[kind] else [f"{where}: {value!r} is no {kind}"]
    if not isinstance(value, dict):
        return [f"{where}: no {kind}"]
    unknown = [f"{where}.{name}: unknown field of {kind}" for name in value if name not in FIELDS[kind]]
    known = [name for name in value if name in FIELDS[kind]]
    return unknown + [
        e for name in known for e in errors_of(value[name], FIELDS[kind][name], f"{where}.{name}")
    ]


def command_of_pod(job: dict[str, Any], index: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of the container in the Job's pod of this index."""
    [container] = job["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    environment["JOB_COMPLETION_INDEX"] = str(index)
    words = container["command"] + container["args"]
    return [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word) for word in words], environment


def small_job(job: dict[str, Any], steps: int, changes: dict[str, str]) -> dict[str, Any]:
    """Return the Job with a rank in each pod, short steps, and other values for some options."""
    job = copy.deepcopy(job)
    args: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    for option, value in {"--nproc-per-node=": "1", **changes}.items():
        [position] = (n for n, arg in enumerate(args) if arg.startswith(option))
        args[position] = option + value
    args += [f"--num_gpus={job['spec']['completions']}", "--model=tiny", "--layers=2", f"--steps={steps}"]
    return job

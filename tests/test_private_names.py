"""Each private name of torch is used in one file, and is still there in the torch that is installed."""

import ast
import importlib
from collections import defaultdict

import pytest
import torch

from tests.run_modes import ROOT

FOLDERS = ("lab", "comm", "training", "data_parallel", "zero", "tensor_parallel", "pipeline_parallel")
FOLDERS += ("context_parallel", "expert_parallel", "low_communication", "hybrid_parallel")


def dotted(node: ast.AST) -> str:
    """Return "torch._C.name" of an attribute of a module; "" of one of an object."""
    if isinstance(node, ast.Name):
        return {"dist": "torch.distributed", "distributed_c10d": "torch.distributed.distributed_c10d"}.get(
            node.id, node.id
        )
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def private_names() -> dict[str, set[str]]:
    """Return the files that use each private name of torch: from its first private part on, one name."""
    found = defaultdict[str, set[str]](set)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        names = set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(dotted(node))
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch" and any(part.startswith("_") and part[1] != "_" for part in parts):
                found[name].add(str(path.relative_to(ROOT)))
    longest = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    return {name: found[name] for name in longest}


NAMES = private_names()


def test_a_private_name_of_torch_is_used_in_one_file():
    several = {name: files for name, files in NAMES.items() if len(files) > 1 and "_pytree" not in name}
    assert not several


@pytest.mark.parametrize("name", sorted(NAMES))
def test_torch_still_has_it(name: str):
    what, *parts = name.split(".")
    value = importlib.import_module(what)
    for part in parts:
        what = f"{what}.{part}"
        if not hasattr(value, part):
            try:
                importlib.import_module(what)
            except ImportError:
                pytest.fail(f"torch {torch.__version__} has no {what}, and {', '.join(NAMES[name])} needs it")
        value = getattr(value, part)

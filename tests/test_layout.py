"""The folders are floors, and an import goes down; links lead somewhere."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = (
    {"lab"},
    {"comm"},
    {"training"},
    {"data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"},
    {"zero"},
    {"low_communication"},
    {"hybrid_parallel"},
)
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
FILES = sorted(path for folder in FLOOR for path in (ROOT / folder).rglob("*.py"))

CLASS_LINES, SCRIPT_LINES = 120, 300
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def imports_of(path: Path) -> Iterator[str]:
    """The first name of each module that the file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def modules_of(path: Path) -> Iterator[str]:
    """The full name of each module from which the file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            yield from [f"comm.{name}" for name in names] if node.module == "comm" else [node.module]


def test_an_import_goes_down_never_up_or_sideways():
    wrong = []
    for path in FILES:
        own = path.relative_to(ROOT).parts[0]
        for name in imports_of(path):
            is_sideways = name != own and FLOOR.get(name, -1) >= FLOOR[own]
            if is_sideways or name in ("tests", "benchmarks", "exercises", "notebooks"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_inside_comm_an_import_goes_down_too():
    floors = (r"comm\.(errors|shards)$", r"comm\.membership", r"comm\.wire", r"comm\.algorithms", "comm")

    def floor_of(module: str) -> int:
        return next(number for number, names in enumerate(floors) if re.match(names, module))

    wrong = []
    for path in (ROOT / "comm").rglob("*.py"):
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        up = [name for name in modules_of(path) if name.startswith("comm") and floor_of(name) > floor_of(own)]
        wrong += [f"{own} imports {name}" for name in up]
    assert not wrong


def test_an_algorithm_knows_messages_and_nothing_of_how_they_move():
    for path in (ROOT / "comm" / "algorithms").glob("*.py"):
        of_wire = {module for module in modules_of(path) if module.startswith("comm.wire")}
        assert of_wire <= {"comm.wire.wire", "comm.wire.hosts"}, path


def test_a_clone_on_windows_has_the_line_ends_with_which_bash_can_run_its_scripts():
    files = subprocess.run(
        ["git", "ls-files", "--eol"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    text = [line for line in files if not line.startswith("i/-text")]
    assert len(text) > 500
    assert [line for line in text if not re.match(r"i/(lf|none) .* attr/text=auto eol=lf ", line)] == []


def test_git_has_nothing_that_a_run_has_left_in_the_root():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = {name.partition("/")[0] for name in tracked.splitlines() if "/" in name and name[0] != "."}
    others = {"benchmarks", "configs", "docs", "exercises", "notebooks", "scripts", "site", "tests"}
    assert sorted(entries - others - set(FLOOR)) == [], "remove it, or name it here"


def test_a_class_and_a_script_are_read_in_one_sitting_or_say_why_not():
    lengths = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("lab/"):
            continue
        text = path.read_text()
        if path.name.startswith("train_"):
            lengths[name] = (len(text.splitlines()), SCRIPT_LINES)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                lengths[f"{name}: {node.name}"] = ((node.end_lineno or 0) - node.lineno + 1, CLASS_LINES)
    longer = {name for name, (lines, most) in lengths.items() if lines > most}
    excused = set(re.findall(r"^\| `(.+?)` \| .+ \|$", CONTRIBUTING, re.MULTILINE))
    assert not longer - excused, "shorten it, or say in the table of CONTRIBUTING.md why it cannot be shorter"
    assert not excused - longer, "it is not longer any more: take it out of the table of CONTRIBUTING.md"
    assert f"at most {CLASS_LINES} lines" in CONTRIBUTING and f"at most {SCRIPT_LINES} lines" in CONTRIBUTING


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("*/README.md"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=str
)
def test_every_link_of_a_page_leads_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert links and not missing

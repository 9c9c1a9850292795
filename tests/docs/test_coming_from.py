"""The page for those who know other libraries maps their names to names that exist here."""

import ast
import functools
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator

import pytest
import tyro

from tests.run_modes import ROOT, SCRIPTS, start_of
from tests.test_help import options_of

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
TARGETS = set(re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
MAGICS = ast.get_docstring(ast.parse((ROOT / "lab/notebook/magics.py").read_text())) or ""
MODES_OF_THE_BLOG = (
    *("comm", "train", "data_parallel_naive", "data_parallel_naive_grad_accumulation"),
    *("data_parallel_overlap", "data_parallel_bucket_overlap", "tensor_parallel"),
)
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./([^)]+)\)")


def rows_of(text: str) -> list[tuple[str, str]]:
    """Return the two cells of each row of the text's tables, without headings."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return [row for row in rows if row[1] != "here"]


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@functools.cache
def names_in(path: str) -> set[str]:
    """Return the names of a file's functions, classes, parameters, fields and attributes, and its own."""
    names = {path.rpartition("/")[2]}
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


@functools.cache
def options(mode: str) -> dict[str, set[str]]:
    """Return the options of a mode, each with its choices."""
    return {
        name: {str(choice) for choice in action.choices or ()}
        for action in options_of(mode)
        for name in action.option_strings
    }


def complaints(cell: str) -> Iterator[str]:
    """Yield each name in a cell that the workbook does not have.

    An option must be one of every mode named in the same part of the cell, up to the next semicolon. Where
    no mode is named, some mode must have it.
    """
    for part in cell.split(";"):
        linked = LINK.findall(part)
        yield from (f"{name} in {path}" for name, path in linked if name not in names_in(path))
        words = re.findall(r"`([^`]+)`", LINK.sub("", part))
        modes = [word for word in words if word in SCRIPTS]
        flags = [word for word in words if word.startswith("--")]
        for flag in flags:
            if modes:
                yield from (f"{flag} of {mode}" for mode in modes if flag not in options(mode))
            elif not any(flag in options(mode) for mode in SCRIPTS):
                yield flag
        for word in set(words) - {*modes, *flags}:
            keyword, _, value = word.partition("=")
            is_choice = any(word in options(mode).get(flag, ()) for mode in modes for flag in flags)
            is_target = word.startswith("make ") and word.split()[1] in TARGETS
            is_magic = word.startswith("%") and word in MAGICS
            is_keyword = bool(value) and any(keyword in names_in(path) for _, path in linked)
            if not (is_choice or is_target or is_magic or is_keyword):
                yield word


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("theirs, ours", rows_of(PAGE))
def test_every_name_on_our_side_exists(theirs: str, ours: str):
    assert "`" in ours or "the same" in ours
    assert not list(complaints(ours))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("theirs", [theirs for theirs, _ in rows_of(section("PyTorch"))])
def test_every_name_of_pytorch_exists(theirs: str):
    for name in re.findall(r"`([^`]+)`", theirs):
        path, _, keyword = name.rstrip("=)").partition("(")
        found = pkgutil.resolve_name(path)
        assert not keyword or keyword in inspect.signature(found).parameters


def test_no_section_is_empty():
    titles = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    systems = ["PyTorch", "DeepSpeed", "Megatron-LM", "torchtitan", "Horovod", "torchft and Hivemind"]
    assert titles == [*systems, "Tutorials"]
    assert all(len(rows_of(section(title))) > 10 for title in titles)


def test_what_the_blog_says_to_run_runs_as_it_is_written_there():
    assert set(MODES_OF_THE_BLOG) <= set(SCRIPTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for mode in ("data_parallel_naive_grad_accumulation", "data_parallel_overlap"):
            assert tyro.cli(start_of(mode).arguments, args=["--grad_acc_steps", "2"]).grad_acc_steps == 2
        words = ["--grad_acc_steps", "2", "--pseudo_computation_time", "0.5"]
        for mode in ("pipeline_afab", "pipeline_1f1b"):
            args = tyro.cli(start_of(mode).arguments, args=words)
            assert (args.microbatches, args.metronome) == (2, "0.5s")

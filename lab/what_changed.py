"""Show what a step of a lesson changes: the difference between the concepts of two scripts.

    make diff FROM=naive TO=overlap
    make diff                           lists the steps

The concept is a file's classes and functions, without imports, `main()`, arguments and the expected traffic.
It is compared method by method, and what is equal is not shown. A class that inherits from another script's
class has that class's methods, too. The site shows the same on the lessons' pages.
"""

import ast
import difflib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "data_parallel_naive": "data_parallel/train_naive.py",
    "data_parallel_overlap": "data_parallel/train_overlap.py",
    "data_parallel_bucket_overlap": "data_parallel/train_bucket_overlap.py",
    "zero1_textbook": "zero/train_zero1_textbook.py",
    "zero1": "zero/train_zero1.py",
    "zero2": "zero/train_zero2.py",
    "zero3_textbook": "zero/train_zero3_textbook.py",
    "zero3": "zero/train_zero3.py",
    "pipeline_model_parallel": "pipeline_parallel/train_model_parallel.py",
    "pipeline_afab": "pipeline_parallel/train_afab.py",
    "pipeline_1f1b_by_hand": "pipeline_parallel/train_1f1b_by_hand.py",
    "local_sgd": "low_communication/train_local_sgd.py",
    "diloco_plain": "low_communication/train_diloco_plain.py",
    "diloco": "low_communication/train_diloco.py",
}
"""The file of each RUN_MODE's concept."""

SHORT = {
    "naive": "data_parallel_naive",
    "overlap": "data_parallel_overlap",
    "buckets": "data_parallel_bucket_overlap",
    "bucket_overlap": "data_parallel_bucket_overlap",
    "model_parallel": "pipeline_model_parallel",
    "afab": "pipeline_afab",
    "1f1b_by_hand": "pipeline_1f1b_by_hand",
}
STEPS: tuple[tuple[str, ...], ...] = (
    ("naive", "overlap", "buckets"),
    ("zero1_textbook", "zero1", "zero2", "zero3_textbook", "zero3"),
    ("model_parallel", "afab", "1f1b_by_hand"),
    ("local_sgd", "diloco_plain", "diloco"),
)
BESIDE = ("main", "traffic")  # functions and methods that are not the concept

Line = tuple[str, str]
"""A sign, which is " ", "-", "+", "@" for the title of a part or "#" for a remark, and a text."""


def steps_of(folder: str) -> list[tuple[str, str]]:
    """Return the steps (from, to) of the lesson in this folder."""
    pairs = [pair for names in STEPS for pair in itertools.pairwise(names)]
    return [pair for pair in pairs if FILES[mode_of(pair[1])].startswith(f"{folder}/")]


def mode_of(name: str) -> str:
    """Return the RUN_MODE of a name or its short form. Raises ValueError with a sentence for other names."""
    mode = SHORT.get(name, name)
    if mode not in FILES:
        chains = "; ".join(" -> ".join(names) for names in STEPS)
        raise ValueError(f"{name!r} is none of the steps that can be compared: {chains}.")
    return mode


def difference(before: str, after: str) -> list[Line]:
    """Return the lines of the difference between two concepts, each changed part under its title."""
    (was, old), (now, new) = (
        parts_of((ROOT / FILES[mode_of(name)]).read_text("utf-8")) for name in (before, after)
    )
    old = {re.sub(rf"^{was}\b", now, name): text for name, text in old.items()}
    inherits = re.search(rf"^class \w+\({was}\)", new[now], re.MULTILINE)
    lines = [("#", f"{was} -> {now}")] if was != now else []
    for name, text in new.items():
        if text == old.get(name) or (name == now and name in old):
            continue
        method = name.rpartition(".")[2]
        adds = inherits and re.search(rf"(super\(\)|{was})\.{method}\(", text)  # the old method still runs
        lines += [("@", name), *changes("" if adds else old.get(name, ""), text)]
    gone = [name.replace(f"{now}.", f"{was}.") for name in old if name not in new]
    return lines + ([("#", f"no more: {', '.join(gone)}")] if gone else [])


def changes(old: str, new: str) -> Iterator[Line]:
    """Yield all lines of both texts, with the sign of what happens to them."""
    a, b = old.splitlines(), new.splitlines()
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from ((" ", line) for line in a[i:j])
        else:
            yield from (("-", line) for line in a[i:j])
            yield from (("+", line) for line in b[k:m])


def parts_of(source: str) -> tuple[str, dict[str, str]]:
    """Return the name of a file's last class, and each function, method and head of a class by its name."""
    tree, parts, lines = ast.parse(source), dict[str, str](), source.splitlines()
    nodes = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    nodes = [node for node in nodes if not (node.name in BESIDE or node.name.endswith("Args"))]
    main = next(node for node in reversed(nodes) if isinstance(node, ast.ClassDef))
    bases = {ast.unparse(base) for base in main.bases}
    for each in tree.body:
        if isinstance(each, ast.ImportFrom) and bases & {alias.name for alias in each.names}:
            base = ROOT / f"{str(each.module).replace('.', '/')}.py"
            if base.name.startswith("train_"):  # another script, whose methods this one has, too
                inherited, found = parts_of(base.read_text("utf-8"))
                parts |= {re.sub(rf"^{inherited}\b", main.name, name): text for name, text in found.items()}
    for node in nodes:
        if node.name in bases:  # what supports the script's class
            continue
        inner = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name not in BESIDE]
        methods = inner if isinstance(node, ast.ClassDef) else []
        head_end = first_line(methods[0]) - 1 if methods else node.end_lineno
        parts[node.name] = "\n".join(lines[first_line(node) - 1 : head_end]).rstrip()
        for method in methods:
            parts[f"{node.name}.{method.name}"] = "\n".join(lines[first_line(method) - 1 : method.end_lineno])
    return main.name, parts


def first_line(node: ast.ClassDef | ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


STYLES = {"-": "red", "+": "green", "@": "bold cyan", "#": "bold", " ": "dim"}


def main(names: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    names = [name for name in names if name]
    if len(names) != 2:
        console.print("make diff FROM=naive TO=overlap shows what a file changes. These are the steps:\n")
        for chain in STEPS:
            console.print("  " + " -> ".join(chain))
        return
    try:
        lines = difference(*names)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    console.print(Text(" -> ".join(FILES[mode_of(name)] for name in names), STYLES["#"]))
    for sign, text in lines:
        console.print(Text(f"\n{text}" if sign in "@#" else f"{sign} {text}".rstrip(), STYLES[sign]))


if __name__ == "__main__":
    main(sys.argv[1:])

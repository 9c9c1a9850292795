"""Ranks and predictions work in the kernel of a Jupyter notebook."""

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from lab.launch.errors import WorkbookError
from lab.notebook import KERNEL, load_ipython_extension
from tests.notebooks.books import BOOKS, ROOT, cells_of


def outputs_of(cells: list[str], fails: int, folder: Path = ROOT) -> list[list[Any]]:
    """Run the cells in a kernel; return the outputs of each. The cell `fails` must end with an error."""
    sources = [textwrap.dedent(cell).strip() for cell in cells]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(book, timeout=60, kernel_name="python3", resources=place)
    with client.setup_kernel():
        for i, cell in enumerate(book.cells):
            try:
                client.execute_cell(cell, i)
                assert i != fails
            except CellExecutionError:
                assert i == fails, cell.outputs
    return [cell.outputs for cell in book.cells]


def test_functions_and_cells_run_on_ranks_and_a_deadlock_can_be_interrupted():
    outputs = outputs_of(
        [
            # Jupyter's kernel has a package called comm too: both must work.
            "from comm import collectives, create_comm, base_comm",
            """
            import torch
            from lab.ranks import run_ranks

            def add_up(cluster):
                x = torch.tensor([float(cluster.rank)])
                collectives.all_reduce(x)
                print("the sum is", x.item())
                return 1 / (cluster.rank - 1)  # rank 1 cannot

            try:
                run_ranks(add_up, 3)
            except RuntimeError as error:
                print(error)
            """,
            "%load_ext lab.notebook\n%ranks 2",
            "%%ranks\nx = torch.ones(1) * rank\nx",
            "import os, threading\nthreading.Timer(0.5, os.kill, (os.getpid(), 2)).start()  # SIGINT",
            "%%ranks\ndist.recv(x, 1 - rank)",
            "%%ranks\ndist.all_reduce(x)\nx",
            "from lab.notebook.prediction import predict\npredict('How many?', example=2).value",
        ],
        fails=5,
    )
    printed = "".join(one.text for one in outputs[1])
    for rank in range(3):
        assert re.search(rf"\[rank {rank}\]\S* the sum is 3\.0", printed)
    assert "return 1 / (cluster.rank - 1)  # rank 1 cannot" in printed and "ZeroDivisionError" in printed
    assert outputs[3][0]["data"]["text/plain"] == "rank 0: tensor([0.])\nrank 1: tensor([1.])"
    assert "<table>" in outputs[3][0]["data"]["text/html"]
    [error] = [one for one in outputs[5] if one["output_type"] == "error"]
    assert "dist.recv(x, 1 - rank)" in "\n".join(error["traceback"])
    assert error["traceback"][-1].strip() == "The ranks keep their variables."
    assert outputs[6][0]["data"]["text/plain"] == "ranks 0, 1: tensor([1.])"
    example, result = outputs[7]
    assert "there is no keyboard" in example["text"] and result["data"]["text/plain"] == "(2, 2)"


def test_in_a_clone_another_kernel_than_its_own_is_told_which_to_choose_and_installs_nothing(tmp_path):
    first = next(cell.source for cell in cells_of(BOOKS[0]) if cell.cell_type == "code")
    (folder := tmp_path / "notebooks").mkdir()
    (tmp_path / "lab").mkdir()
    foreign = "import os, sys\nsys.modules['lab'] = None\nos.environ['PATH'] = ''"
    [_, said] = outputs_of([foreign, first], 1, folder)
    assert [one["evalue"] for one in said if one.output_type == "error"] == [KERNEL]
    assert "Fetching" not in str(said) and not list(folder.iterdir())


def test_a_kernel_of_another_clone_or_without_the_libraries_is_told_which_to_choose(tmp_path, monkeypatch):
    (folder := tmp_path / "notebooks").mkdir()
    (tmp_path / "lab" / "notebook").mkdir(parents=True)
    (tmp_path / "lab" / "notebook" / "__init__.py").touch()
    with pytest.raises(WorkbookError, match="has no lab.notebook.magics. Choose .venv"):
        monkeypatch.setitem(sys.modules, "lab.notebook.magics", None)
        load_ipython_extension(None)
    monkeypatch.chdir(folder)
    with pytest.raises(WorkbookError, match=f"runs the workbook in {ROOT}, another clone. Choose .venv"):
        load_ipython_extension(None)

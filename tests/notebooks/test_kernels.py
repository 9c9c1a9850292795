"""Ranks and predictions work in the kernel of a Jupyter notebook."""

import re
import textwrap
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def outputs_of(cells: list[str], fails: int) -> list[list[Any]]:
    """Run the cells in a kernel; return the outputs of each. The cell `fails` must end with an error."""
    sources = [textwrap.dedent(cell).strip() for cell in cells]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = NotebookClient(book, timeout=60, kernel_name="python3")
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

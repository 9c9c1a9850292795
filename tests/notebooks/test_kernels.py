"""Ranks and predictions work in the kernel of a Jupyter notebook."""

import re
import textwrap
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from lab.notebook.cell_output import LIVE_LINES


def test_a_notebook_cell_is_run_in_every_rank_beside_jupyters_own_comm_package():
    cells = [
        # Jupyter's kernel has a package called comm too: both must work.
        "from comm import collectives\nimport torch\nfrom lab.ranks import run_ranks",
        """
        def add_up(cluster):
            x = torch.tensor([float(cluster.rank)])
            collectives.all_reduce(x)
            print("the sum is", x.item())
            return x.item()

        run_ranks(add_up, 3)
        """,
        """
        def divide(cluster):
            return 1 / cluster.rank  # rank 0 cannot

        try:
            run_ranks(divide, 2)
        except RuntimeError as error:
            print(error)
        """,
        "from comm import create_comm, base_comm\nprint(get_ipython().kernel.comm_manager is not None)",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in cells]
    )
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    _, summed, failed, both = [cell.outputs for cell in notebook.cells]
    printed = "".join(output.text for output in summed if output.output_type == "stream")
    for rank in range(3):
        assert re.search(rf"\[rank {rank}\]\S* the sum is 3\.0", printed)
    assert summed[-1].data["text/plain"] == "[3.0, 3.0, 3.0]"
    assert "return 1 / cluster.rank  # rank 0 cannot" in failed[0].text
    assert "ZeroDivisionError" in failed[0].text
    assert both[0].text.strip() == "True"


def test_it_works_in_a_notebooks_kernel_where_a_deadlock_can_be_interrupted():
    cells = [
        "%load_ext lab.notebook",
        "%ranks 2",
        "%%ranks\nx = torch.ones(1) * rank\nx",
        f"%%ranks\nfor i in range({LIVE_LINES}):\n    print('line', i)",
        "import os, signal, threading\nthreading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()",
        "%%ranks\ndist.recv(x, 1 - rank)",
        "%%ranks\ndist.all_reduce(x)\nx",
    ]
    outputs = outputs_of(cells, fails=[5])
    assert outputs[2][0]["data"]["text/plain"] == "rank 0: tensor([0.])\nrank 1: tensor([1.])"
    assert "<table>" in outputs[2][0]["data"]["text/html"]
    collapsed = [one["data"]["text/html"] for one in outputs[3] if one["output_type"] == "display_data"]
    assert [text.count("<details>") for text in collapsed] == [1, 1]
    [error] = [one for one in outputs[5] if one["output_type"] == "error"]
    assert "dist.recv(x, 1 - rank)" in "\n".join(error["traceback"])
    assert error["traceback"][-1].strip() == "The ranks keep their variables."
    assert outputs[6][0]["data"]["text/plain"] == "ranks 0, 1: tensor([1.])"


def outputs_of(cells: list[str], fails: list[int]) -> list[list[Any]]:
    """Run the cells in a kernel; return the outputs of each. The cells in `fails` must end with an error."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(book, timeout=60, kernel_name="python3")
    with client.setup_kernel():
        for i, cell in enumerate(book.cells):
            try:
                client.execute_cell(cell, i)
                assert i not in fails
            except CellExecutionError:
                assert i in fails, cell.outputs
    return [cell.outputs for cell in book.cells]


def test_a_kernel_without_a_frontend_takes_the_example():
    source = "from lab.notebook.prediction import predict\npredict('How many?', example=2).value"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(book, timeout=60, kernel_name="python3").execute()
    printed, result = book.cells[0].outputs
    assert "there is no keyboard" in printed["text"]
    assert result["data"]["text/plain"] == "2"

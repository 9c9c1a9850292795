"""Each notebook is a pair: a readable .py, and an .ipynb with the same cells and their outputs."""

import jupytext
import nbformat
import pytest

from tests.notebooks.books import BOOKS, NAMES, ROOT, source_of


def test_each_source_has_a_notebook():
    assert sorted(path.stem for path in (ROOT / "notebooks" / "source").glob("*.py")) == NAMES
    assert NAMES


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_both_files_have_the_same_cells(book):
    def cells(notebook) -> list[tuple[str, str]]:
        return [(cell.cell_type, cell.source) for cell in notebook.cells]

    assert cells(nbformat.read(book, 4)) == cells(jupytext.read(source_of(book)))


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_each_code_cell_was_executed_without_an_error(book):
    cells = [cell for cell in nbformat.read(book, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [one for cell in cells for one in cell.outputs if one.output_type == "error"]

"""Executing a notebook again gives the outputs that it has, apart from times and paths."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebooks.books import BOOKS, NAMES, texts_of


@pytest.mark.parametrize("book", BOOKS[::-1], ids=NAMES[::-1])  # the last one takes longest
def test_a_notebook_executes_with_the_outputs_that_it_has(book):
    stored = nbformat.read(book, 4)
    executed = nbformat.read(book, 4)
    NotebookClient(
        executed, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(book.parent)}}
    ).execute()
    for before, after in zip(stored.cells, executed.cells, strict=True):
        if before.cell_type == "code":
            assert texts_of(after.outputs) == texts_of(before.outputs), before.source

"""A tensor parallel model trains as the plain one does on one process."""

import pytest

from lab.ranks import run_ranks
from tests.tensor_parallel.equivalence import compare_with_one_process


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_gradient_and_parameter_is_that_of_one_process(n: int, sequence_parallel: bool):
    def compare(cluster) -> None:
        compare_with_one_process(cluster, sequence_parallel)
        compare_with_one_process(cluster, sequence_parallel, tied=False, clip=0.1, steps=2)

    run_ranks(compare, n)

"""With sequence parallel norms and biases drift apart: their gradients come from a rank's own tokens only."""

TARGET = "tensor_parallel.parallel_model.TensorParallel.finish_gradient_sync"
KILLER = (
    "tests.tensor_parallel.test_parallelize"
    ".test_two_ranks_with_sequence_parallel_have_the_gradients_of_one_process"
)
CAUSE = "not added up over the ranks"


def mutant(self) -> None:
    pass

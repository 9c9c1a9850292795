"""With sequence parallel norms and biases drift apart: their gradients come from a rank's own tokens only."""

TARGET = "tensor_parallel.parallel_model.TensorParallel.finish_gradient_sync"
KILLER = "tests.tensor_parallel.test_parallelize.test_two_ranks_have_the_gradients_of_one_process_by_tokens"


def mutant(self) -> None:
    pass

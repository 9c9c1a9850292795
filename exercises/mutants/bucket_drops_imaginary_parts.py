"""With compressed buckets complex gradients lose their imaginary part, so complex weights become real."""

from torch import Tensor

TARGET = "data_parallel.wire_format.real_numbers"
KILLER = (
    "tests.data_parallel.test_dtypes"
    ".test_complex_gradients_keep_their_imaginary_parts_and_are_clipped_as_in_one_process"
)
CAUSE = "imaginary parts are lost"
SYMPTOM = "With compressed buckets complex weights become real."


def mutant(flat: Tensor) -> Tensor:
    return flat

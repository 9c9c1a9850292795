"""Complex weights turn until they are real: what is rounded for the wire loses its imaginary part."""

from data_parallel.bucket_layout import Bucket

TARGET = "data_parallel.bucket_layout.Bucket"
KILLER = (
    "tests.data_parallel.test_dtypes."
    "test_complex_gradients_keep_their_imaginary_parts_rounded_or_not_and_are_clipped_as_in_one_process"
)


class mutant(Bucket):
    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self._numbers = self.flat

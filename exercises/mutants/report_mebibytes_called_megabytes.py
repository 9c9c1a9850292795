"""Reports show powers of 1024 as kB and MB, so traffic looks smaller than it is."""

TARGET = "lab.units.show_bytes"
KILLER = "tests.lab.test_units.test_a_size_and_a_rate_are_shown_in_the_unit_that_suits_them"


def mutant(num_bytes: float) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1024:.1f} kB" if num_bytes < 1024**2 else f"{num_bytes / 1024**2:.1f} MB"

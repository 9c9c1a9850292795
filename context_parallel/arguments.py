"""Validate what context parallel scripts and functions are given."""

from context_parallel.sequence_cut import SequenceCut
from lab.launch.errors import WorkbookError

MAX_LENGTH = 1 << 20


def validate_length(length: int) -> None:
    """Raise WorkbookError unless a sequence can have so many tokens."""
    if not 1 <= length <= MAX_LENGTH:
        raise WorkbookError(f"--length {length}: a sequence has 1 to {MAX_LENGTH} tokens.")


def validate_heads(heads: int, ranks: int) -> None:
    """Raise WorkbookError unless the ranks can have equally many heads of keys and values."""
    if heads % ranks:
        raise WorkbookError(
            f"All-to-all attention divides heads, and {heads} heads of keys and values cannot be divided "
            f"among {ranks} ranks equally: choose a number of ranks that divides {heads}, or ring attention."
        )


def refuse_dropout(dropout: float) -> None:
    """Raise WorkbookError if attention probabilities were to be dropped."""
    if dropout:
        raise WorkbookError(
            f"Ring attention drops no attention probabilities, and the model asks for {dropout:g}: "
            "take all-to-all attention, or set `dropout` of the model's attention to 0."
        )


def validate_contiguous(cut: SequenceCut) -> None:
    """Raise WorkbookError unless the ranks' tokens, one rank's behind the other's, are the sequence."""
    if any(len(pieces) > 1 for pieces in cut.pieces):
        raise WorkbookError(
            "All-to-all attention needs the tokens in the order of the ranks: cut the sequence with "
            "SequenceCut.contiguous. No other cut would balance it better."
        )

"""The fields with which the summary of every train script begins, in their order."""

FIELDS = [
    "run_mode",
    "world_size",
    "steps",
    "first_loss",
    "last_loss",
    "step_seconds",
    "tokens_per_second",
    "peak_memory_bytes",
    "bytes_sent",
    "messages_sent",
]

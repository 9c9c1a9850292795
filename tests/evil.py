"""Provide an object that runs code when it is unpickled, for tests that checkpoints never run any."""

import os
from typing import Any


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)

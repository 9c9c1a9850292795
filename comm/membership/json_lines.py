"""Send JSON objects through a socket, one per line."""

import json
import socket
from collections.abc import Mapping
from typing import Any

_LONGEST_LINE = 1 << 16


def json_line(message: Mapping[str, Any]) -> bytes:
    """Return the object as a line."""
    return json.dumps(message).encode() + b"\n"


class JsonLines:
    """Read JSON objects, one per line, from a non-blocking socket."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.rank: int | None = None
        self._rest = b""

    def read(self) -> tuple[list[dict], bool]:
        """Return the objects that have arrived, and whether more may arrive."""
        is_open = True
        try:
            data = self.end.recv(_LONGEST_LINE)
            is_open = bool(data)
        except BlockingIOError:
            data = b""
        except OSError:
            data, is_open = b"", False
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return [], False
        is_open = is_open and len(self._rest) < _LONGEST_LINE
        return [message for message in messages if isinstance(message, dict)], is_open

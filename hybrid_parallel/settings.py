"""Know the keys of a configuration and the types of their values, and say where a wrong value stands."""

import re
from collections.abc import Sequence
from typing import Any, Literal, get_type_hints

from hybrid_parallel.arguments import HybridArgs, Pattern
from hybrid_parallel.config_file import (
    Entry,
    NotAllowed,
    allowed,
    read_file,
    read_overrides,
    read_value,
    validate_key,
)
from lab.launch.errors import WorkbookError
from training.arguments import Size

FIELDS = {"model": "size", "pipeline_parallelism": "pipeline", "zero_redundancy": "zero"}
FIELDS |= {"communication_pattern": "pattern"}
"""The keys that set an option of HybridArgs with another name. `model` sets `size`, unless it is a kind."""
KINDS = ("gpt", "mlp")  # of models

_TYPES: dict[str, Any] = {
    "model": Literal[Size, "gpt", "mlp"],
    "batch_size": int,
    "num_gpus": int,
    "pipeline_parallelism": bool | int,
    "zero_redundancy": bool | Literal[1, 2, 3],
    "sharding_strategy": Literal["auto", "manual"],
    "communication_pattern": Pattern,
}
OPTIONS = {name: hint for name, hint in get_type_hints(HybridArgs).items() if hint is not type(None)}
del OPTIONS["config"]
KEYS: dict[str, Any] = _TYPES | {name: hint for name, hint in OPTIONS.items() if name not in _TYPES}
"""Every key with the type of its value."""


def field_of(entry: Entry) -> str:
    """Return the name of the option that the entry sets."""
    is_kind = entry.key == "model" and entry.text in KINDS
    return "model" if is_kind else FIELDS.get(entry.key, entry.key)


class Settings:
    """Holds the entries of a file and of a command line by what they set, and their values."""

    def __init__(self, path: str, overrides: Sequence[str]) -> None:
        self._path = path
        in_file, self._last_line = read_file(path)
        switches = {key for key, hint in KEYS.items() if "True" in allowed(hint)}
        on_command_line = read_overrides(overrides, KEYS, switches)
        self._entries: dict[str, Entry] = {}
        for entry in in_file:
            validate_key(entry.key, KEYS, f"{path}, {entry.place}")
            field = field_of(entry)
            same_key = (e for e in self._entries.values() if e.key == entry.key)
            if (first := self._entries.get(field) or next(same_key, None)) is not None:
                same = f"means the same as {first.key}" if first.key != entry.key else "is given already"
                raise WorkbookError(
                    f"{path}, {entry.place}: {entry.key} {same} in {first.place}; keep one of the two."
                )
            self._entries[field] = entry
        if any(entry.key == "model" for entry in on_command_line):
            self._entries.pop(
                "model", None
            )  # --model small asks for a GPT, also where the file asks for an MLP
        self._entries |= {field_of(entry): entry for entry in on_command_line}
        self.values = {field: self._value(entry) for field, entry in self._entries.items()}

    def _value(self, entry: Entry) -> Any:
        try:
            return read_value(entry, KEYS[entry.key])
        except NotAllowed as error:
            raise self._error(str(error), [entry]) from None

    def number(self, key: str, default: int | None, largest: int) -> int:
        """Return the value of a key, from 1 to `largest`. Without a default the key must be there."""
        value = self.values.get(key, default)
        if value is None:
            raise WorkbookError(
                f"{self._path}, line {self._last_line}: the file ends without {key}; add it, as in {key}: 4."
            )
        if not 1 <= value <= largest:
            raise self.error(f"{key} is {value}; it must be from 1 to {largest}.", key)
        return value

    def error(self, sentence: str, *fields: str) -> WorkbookError:
        """Return the error with the places of the entries that set these fields in front."""
        return self._error(sentence, [self._entries[field] for field in fields if field in self._entries])

    def blame(self, error: WorkbookError) -> WorkbookError:
        """Return a refusal with the places of the entries in front that it names by option or size.

        What follows a colon or semicolon is advice, and may name what is not wrong.
        """
        sentence = re.sub(
            r"^--([\w-]+) (\S+): ", lambda m: f"{m[1].replace('-', '_')} is {m[2]}: ", str(error)
        )
        fact = re.split("[:;]", sentence.replace("--", "").replace("-", "_"))[0]
        nouns = {"pipeline": "pipeline|stages?", "chunks": "chunks|stages", "schedule": "schedule|stages"}
        nouns |= {"data": "data|replicas", "batch_size": "batch_size|examples", "size": "heads|the model"}
        nouns |= {"num_gpus": "num_gpus|processes"}
        fields = [f for f in self._entries if re.search(rf"\b({nouns.get(f, f)})\b", fact)]
        return self.error(sentence, *(fields or ["num_gpus"]))

    def _error(self, sentence: str, entries: Sequence[Entry]) -> WorkbookError:
        in_file = [e for e in entries if not e.place.startswith("--")]
        places = [self._path] if in_file else []
        for entry in [*in_file, *(e for e in entries if e not in in_file)]:
            is_named = len(entries) == 1 and entry.key in sentence
            is_option = entry.place.startswith("--")
            places.append(entry.place if is_named or is_option else f"{entry.place} ({entry.key})")
        return WorkbookError(f"{', '.join(places)}: {sentence}")

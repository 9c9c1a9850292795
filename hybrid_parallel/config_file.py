"""Read the entries of a configuration: a YAML file, and `--key value` of a command line, each with its place.

An entry keeps the text as it was written and what YAML takes it for. Nothing is constructed from it, so a
file can contain no program. `read_value` turns an entry into a value of the type that its key asks for.
"""

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from lab.launch.errors import WorkbookError, reason

MAX_BYTES = 1 << 20
_SCALARS = yaml.SafeLoader("")  # decides what a plain text means, such as True or 8
_NAMES = {int: "an integer", float: "a number", str: "a line of text", type(None): "None"}


@dataclass(frozen=True)
class Entry:
    """Holds a key, what is written as its value, and where: "line 4", or "--tensor" on the command line.

    `kind` is YAML's name of the value's type: int, float, bool, null, str, seq, map.
    """

    key: str
    text: str
    kind: str
    place: str
    quoted: bool = False

    @property
    def shown(self) -> str:
        """Return the value as a message shows it."""
        if self.kind in ("seq", "map"):
            return {"seq": "a list", "map": "a mapping"}[self.kind]
        text = self.text if len(self.text) <= 40 else self.text[:37] + "..."
        plain = self.kind in ("int", "float", "bool") and not self.quoted
        return text if plain else repr(text) if text else "empty"


class NotAllowed(ValueError):
    """Says that an entry's value has the wrong type. The text is the sentence, without the place."""


def read_file(path: str) -> tuple[list[Entry], int]:
    """Return the entries of a YAML file and its number of lines. Raise WorkbookError if it has no entries."""
    text = _text_of(path)
    last = max(1, len(text.splitlines()))
    example = "write one key and its value a line, such as num_gpus: 8"
    try:
        _refuse_nesting(path, text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _unreadable(path, text, error) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise WorkbookError(f"{path}, line {line}: there is a character that YAML does not allow.") from None
    if root is None:
        raise WorkbookError(f"{path}, line {last}: the file is empty; {example}.")
    if not isinstance(root, yaml.MappingNode):
        what = "a list" if isinstance(root, yaml.SequenceNode) else "text without keys"
        line = root.start_mark.line + 1
        raise WorkbookError(f"{path}, line {line}: the file is {what}; {example}.")
    return [_entry(path, key, value) for key, value in root.value], last


def _refuse_nesting(path: str, text: str) -> None:
    """Raise WorkbookError for lists in lists, which `yaml.compose` reads by recursion. No value is a list."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 9:
            line = event.start_mark.line + 1
            raise WorkbookError(f"{path}, line {line}: lists are in lists; no key has a list as its value.")


def _text_of(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise WorkbookError(f"--config {path}: the file cannot be read ({reason(error)}).") from error
    if len(content) > MAX_BYTES:
        raise WorkbookError(f"--config {path}: the file has more than a MiB, so it is no configuration.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise WorkbookError(f"{path}, line {line}: the file is not text in UTF-8.") from None


def _unreadable(path: str, text: str, error: yaml.MarkedYAMLError) -> WorkbookError:
    mark = error.problem_mark or error.context_mark
    number = min(mark.line + 1, max(1, len(text.splitlines()))) if mark else 1
    line = (text.splitlines() or [""])[number - 1]
    if "\t" in line:
        return WorkbookError(
            f"{path}, line {number}: {line.strip()[:40]!r} has a tab; YAML takes only spaces."
        )
    return WorkbookError(
        f"{path}, line {number}: {line.strip()[:40]!r} is not YAML ({error.problem}); "
        "write one key and its value a line, such as num_gpus: 8."
    )


def _entry(path: str, key: yaml.Node, value: yaml.Node) -> Entry:
    line = key.start_mark.line + 1
    if not isinstance(key, yaml.ScalarNode):
        raise WorkbookError(
            f"{path}, line {line}: a key is a word, such as num_gpus, and not a list or mapping."
        )
    kind = value.tag.rpartition(":")[2]
    if not isinstance(value, yaml.ScalarNode):
        return Entry(key.value, "", "seq" if isinstance(value, yaml.SequenceNode) else "map", f"line {line}")
    return Entry(key.value, value.value, kind, f"line {line}", quoted=value.style is not None)


def read_overrides(words: Sequence[str], keys: Collection[str], switches: Collection[str]) -> list[Entry]:
    """Return the entries of `--key value`, `--key=value`, and of `--key` and `--no-key` for `switches`."""
    entries: list[Entry] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, text = word.partition("=")
        if not option.startswith("--") or option == "--":
            raise WorkbookError(f"The command line has {word!r} where --key value should stand.")
        key = option[2:].replace("-", "_")
        if key not in keys and key.startswith("no_") and key[3:] in switches and not equals:
            key, text, equals = key[3:], "False", "="
        validate_key(key, keys, option)
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif key in switches:
                text = "True"
            else:
                raise WorkbookError(f"{option} has no value; write {option} VALUE.")
        tag = _SCALARS.resolve(yaml.ScalarNode, text, (True, False))
        entries.append(Entry(key, text, tag.rpartition(":")[2], option))
    return entries


def validate_key(key: str, keys: Collection[str], place: str) -> None:
    """Raise WorkbookError, with the nearest known key, if there is no such key."""
    if key in keys:
        return
    near = difflib.get_close_matches(re.sub(r"\W", "_", key.lower()), keys, n=1)
    help_ = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}."
    raise WorkbookError(f"{place}: there is no key {key[:40]!r}; {help_}")


def read_value(entry: Entry, hint: Any) -> Any:
    """Return the entry's value as one of the types in `hint`. Raise NotAllowed if it is none of them."""
    for one in _options(hint):
        try:
            return _read_as(entry, one)
        except NotAllowed:
            continue
    raise NotAllowed(f"{entry.key} is {entry.shown}; it must be {allowed(hint)}.")


def _read_as(entry: Entry, wanted: Any) -> Any:
    """Return the entry's value as a bool, int, float, str, None, or as the constant `wanted`."""
    plain = not entry.quoted
    if wanted is bool and entry.kind == "bool" and plain:
        return entry.text.lower() in ("true", "yes", "on")
    if wanted is int and entry.kind == "int" and plain and re.fullmatch(r"-?(0|[1-9]\d{0,99})", entry.text):
        return int(entry.text)
    # YAML 1.1 takes 1e-3, which has no dot, for text.
    is_number = entry.kind in ("int", "float", "str") and plain
    if wanted is float and is_number and re.fullmatch(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", entry.text):
        return float(entry.text)
    is_text = entry.kind in ("str", "timestamp") or (entry.place.startswith("--") and entry.text)
    if wanted is str and is_text and entry.text.strip() and entry.text.isprintable():
        return entry.text
    if wanted is type(None) and plain and (entry.kind == "null" or entry.text in ("None", "none")):
        return None
    if isinstance(wanted, str) and entry.text == wanted and entry.kind not in ("seq", "map"):
        return wanted
    if type(wanted) is int and _read_as(entry, int) == wanted:
        return wanted
    raise NotAllowed


def _options(hint: Any) -> list[Any]:
    """Return the types and constants of a union or Literal, None before text."""
    if hint is None:
        return [type(None)]
    if get_origin(hint) is Literal or get_args(hint):
        options = [option for part in get_args(hint) for option in _options(part)]
        return sorted(options, key=lambda option: option is str)
    return [hint]


def allowed(hint: Any) -> str:
    """Return the allowed values as a phrase: "True, False or an integer"."""
    names: list[str] = []
    for option in _options(hint):
        names += ["True", "False"] if option is bool else [_NAMES.get(option) or str(option)]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))

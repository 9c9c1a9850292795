"""Read the shape of a model from a file: a YAML file of its fields, or a Hugging Face config.json.

      # my_model.yaml                        the fields of ModelShape (model_shape.py), under their names
      num_layers: 32
      width: 4096
      ...

A config.json is read as data and runs no code. Of the many architectures on the Hugging Face hub those are
known that differ from ModelShape in nothing that memory and time depend on; others are refused by name.
"""

import json
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from hybrid_parallel.planner.model_shape import ModelShape
from lab.launch.errors import WorkbookError, reason

# Fields of transformers' configurations, by the field of ModelShape: GPT-2's names differ from Llama's.
LLAMA = {
    "num_layers": "num_hidden_layers",
    "width": "hidden_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "sequence_length": "max_position_embeddings",
    "num_kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "feed_forward_width": "intermediate_size",
}
GPT2 = {
    "num_layers": "n_layer",
    "width": "n_embd",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
    "sequence_length": "n_positions",
    "feed_forward_width": "n_inner",
}
EXPERTS = {"experts": "num_local_experts", "active_experts": "num_experts_per_tok"}
NAMES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "mixtral": LLAMA | EXPERTS,
}
OPTIONAL = ("num_kv_heads", "head_width", "feed_forward_width")


def read_shape(path: Path) -> ModelShape:
    """Return the shape that a .yaml file or a Hugging Face config.json describes.

    WorkbookError says in one sentence what cannot be read, is unknown, missing, or of the wrong type.
    """
    try:
        text = path.read_text()
        given = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise WorkbookError(f"There is no file {path}.") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise WorkbookError(f"{path} cannot be read: {reason(error)}.") from None
    if not isinstance(given, dict):
        raise WorkbookError(f"{path} must hold names with values, such as num_layers: 32.")
    return _from_hugging_face(path, given) if path.suffix == ".json" else _from_fields(path, given)


def _from_fields(path: Path, given: dict[str, Any]) -> ModelShape:
    known = {field.name: field for field in fields(ModelShape)}
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            hint = f"do you mean {near[0]}?" if near else f"known are {', '.join(known)}."
            raise WorkbookError(f"{path}: a model has no {name}; {hint}")
    required = list(known)[: list(known).index("num_kv_heads")]
    missing = [name for name in required if name not in given]
    if missing:
        raise WorkbookError(f"{path} does not say {', '.join(missing)}.")
    for name, value in given.items():
        wanted = bool if known[name].type is bool else int
        if type(value) is not wanted and not (value is None and name in OPTIONAL):
            kind = "true or false" if wanted is bool else "an integer"
            raise WorkbookError(f"{path}: {name} is {value!r}; it must be {kind}.")
    return _made(path, given)


def _from_hugging_face(path: Path, given: dict[str, Any]) -> ModelShape:
    model_type = given.get("model_type")
    if model_type not in NAMES:
        raise WorkbookError(
            f"{path} describes a model of type {model_type!r}, which the planner does not know; known are "
            f"{', '.join(NAMES)}. Write its sizes into a .yaml file instead."
        )
    sizes: dict[str, Any] = {}
    for name, theirs in NAMES[model_type].items():
        value = given.get(theirs)
        if value is None and name in OPTIONAL:
            continue
        if type(value) is not int:
            raise WorkbookError(f"{path}: {theirs} is {value!r}; it must be an integer.")
        sizes[name] = value
    is_gpt2 = model_type == "gpt2"
    sizes |= {
        "gated": not is_gpt2,
        "learns_bias": is_gpt2,
        "tied": bool(given.get("tie_word_embeddings", is_gpt2)),
        "positions": sizes["sequence_length"] if is_gpt2 else 0,
        "dropout": is_gpt2,
    }
    return _made(path, sizes)


def _made(path: Path, sizes: dict[str, Any]) -> ModelShape:
    try:
        return ModelShape(**sizes)
    except WorkbookError as error:
        raise WorkbookError(f"{path}: {error}") from None

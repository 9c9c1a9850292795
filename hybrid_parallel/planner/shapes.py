"""Give the shape of a model: the numbers that decide its memory and its time (model_shape.py, mlp_shape.py).

    shape_of("llama-3-8b")             a name of SHAPES, or one of this workbook's GPTs (lab/models/model.py)
    shape_of("my_model.yaml")          a file with the fields of ModelShape, see shape_files.py
    shape_of("checkpoint/config.json") the configuration of a Hugging Face model on disk

What memory_model.py and time_model.py predict depends on these numbers alone.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_parallel.planner.mlp_shape import MLPShape
from hybrid_parallel.planner.model_shape import ModelShape
from hybrid_parallel.planner.shape_files import read_shape
from lab.launch.errors import WorkbookError
from lab.models.model import SIZES, GPTConfig, MLPConfig

AnyShape = ModelShape | MLPShape


def _llama(layers: int, width: int, heads: int, inner: int) -> ModelShape:
    """Return a Llama 3: The Llama 3 Herd of Models, 2024, arXiv:2407.21783, table 3."""
    return ModelShape(
        layers, width, heads, 128_256, 8192, 8, None, inner, gated=True, tied=False, learns_bias=False
    )


def _megatron(layers: int, width: int, heads: int) -> ModelShape:
    """Return a GPT of Narayanan et al. 2021, arXiv:2104.04473, table 1: before fused attention."""
    return ModelShape(layers, width, heads, 51_200, 2048, positions=2048, dropout=True, fused_attention=False)


SHAPES = {
    "gpt-3-175b": ModelShape(96, 12_288, 96, 51_200, 2048, positions=2048),  # Brown et al. 2020, table 2.1
    "llama-3-8b": _llama(32, 4096, 32, 14_336),
    "llama-3-70b": _llama(80, 8192, 64, 28_672),
    "llama-3-405b": _llama(126, 16_384, 128, 53_248),
    # Jiang et al., "Mixtral of Experts", 2024, arXiv:2401.04088, table 1.
    "mixtral-8x7b": ModelShape(
        32, 4096, 32, 32_000, 8192, 8, None, 14_336, True, False, False, experts=8, active_experts=2
    ),
    "megatron-1.7b": _megatron(24, 2304, 24),
    "megatron-3.6b": _megatron(30, 3072, 32),
    "megatron-7.5b": _megatron(36, 4096, 32),
    "megatron-18.4b": _megatron(40, 6144, 48),
    "megatron-39.1b": _megatron(48, 8192, 64),
    "megatron-76.1b": _megatron(60, 10_240, 80),
    "megatron-145.6b": _megatron(80, 12_288, 96),
    "megatron-310.1b": _megatron(96, 16_384, 128),
    "megatron-529.6b": _megatron(105, 20_480, 128),
    "megatron-1008b": _megatron(128, 25_600, 160),
}


def shape_of(model: str, **changes: Any) -> AnyShape:
    """Return the shape of a named model, or the one that a file on disk describes, with some fields changed.

    WorkbookError if there is no such name or file, or if the file describes no decoder-only transformer.
    """
    if model in SHAPES:
        return replace(SHAPES[model], **changes)
    if model == "mlp":
        return replace(MLPShape(), **changes)
    if model in SIZES:
        return replace(workbook_shape(model), **changes)
    if Path(model).suffix in (".yaml", ".yml", ".json"):
        return replace(read_shape(Path(model)), **changes)
    raise WorkbookError(
        f"There is no model {model!r}: choose one of {', '.join([*SHAPES, *SIZES, 'mlp'])}, or give a .yaml "
        "file or a Hugging Face config.json."
    )


def workbook_shape(name: str) -> ModelShape:
    """Return the shape of one of this workbook's GPTs."""
    shape = shape_of_config(SIZES[name])
    assert isinstance(shape, ModelShape)
    return shape


def shape_of_config(config: GPTConfig | MLPConfig, experts: int = 1, active_experts: int = 1) -> AnyShape:
    """Return the shape of one of this workbook's models, whose MLPs may be mixtures of experts.

    Raise WorkbookError for experts of a model without blocks, or for more active experts than there are.
    """
    if isinstance(config, MLPConfig):
        if experts > 1:
            raise WorkbookError(f"experts is {experts}, and an MLP has no blocks to put them in; take a gpt.")
        return MLPShape(**vars(config))
    return ModelShape(
        config.num_layers,
        config.width,
        config.num_heads,
        config.vocab_size,
        config.block_size,
        config.kv_heads,
        tied=config.tied,
        positions=config.block_size,
        dropout=config.dropout > 0,
        experts=experts,
        active_experts=active_experts,
    )

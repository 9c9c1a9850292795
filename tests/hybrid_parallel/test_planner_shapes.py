"""A shape has the parameters of the real model, and comes from a name, a YAML file or a config.json."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from hybrid_parallel.planner.shapes import SHAPES, ModelShape, shape_of, workbook_shape
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, SIZES, GPTConfig

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2
}  # fmt: skip


def written(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", SIZES)
def test_a_gpt_of_this_workbook_has_the_parameters_of_its_shape(name: str):
    parameters = GPT(SIZES[name]).parameters()
    assert sum(parameter.numel() for parameter in parameters) == workbook_shape(name).num_parameters


def test_untied_weights_and_grouped_heads_are_counted():
    config = GPTConfig(num_layers=2, num_heads=4, num_kv_heads=2, width=32, tied=False)
    shape = ModelShape(2, 32, 4, 256, 128, num_kv_heads=2, tied=False, positions=128)
    assert shape.num_parameters == sum(parameter.numel() for parameter in GPT(config).parameters())


# Of the model cards: 8030261248 for Meta-Llama-3-8B, and so on; gpt2 has 124439808.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_a_named_model_has_as_many_parameters_as_the_published_one(name: str, parameters: int):
    assert SHAPES[name].num_parameters == parameters


def test_a_mixture_of_experts_computes_with_the_active_ones_only():
    shape = SHAPES["mixtral-8x7b"]
    weights = shape.num_layers * shape.active_weights + shape.head_parameters + shape.embedding_parameters
    assert weights == pytest.approx(12.88e9, rel=0.001)  # "13B active parameters", Jiang et al. 2024


def test_operations_are_those_of_the_formula_in_the_megatron_paper():
    shape = SHAPES["megatron-39.1b"]
    s, h, n, v = shape.sequence_length, shape.width, shape.num_layers, shape.vocab_size
    assert shape.flops_per_token() == pytest.approx(72 * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h)))


@pytest.mark.parametrize(
    ("config", "parameters"), [(LLAMA, 8_030_261_248), (GPT2, 124_439_808), (MIXTRAL, 46_702_792_704)]
)
def test_a_config_of_hugging_face_gives_the_real_number_of_parameters(tmp_path, config, parameters: int):
    assert shape_of(written(tmp_path / "config.json", config)).num_parameters == parameters


def test_a_yaml_file_gives_every_field_back(tmp_path):
    for shape in SHAPES.values():
        assert shape_of(written(tmp_path / "model.yaml", yaml.safe_dump(asdict(shape)))) == shape


def test_fields_of_a_named_model_can_be_changed():
    assert shape_of("llama-3-8b", sequence_length=7).sequence_length == 7
    assert shape_of("small", sequence_length=7).sequence_length == 7


SMALL = "num_layers: 2\nwidth: 8\nnum_heads: 2\nvocab_size: 16\nsequence_length: 4\n"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("m.yaml", SMALL.replace("width", "widht"), "a model has no widht; do you mean width?"),
        ("m.yaml", SMALL.replace("width: 8\n", ""), "does not say width."),
        ("m.yaml", SMALL.replace("8", "eight"), "width is 'eight'; it must be an integer."),
        ("m.yaml", SMALL + "tied: 1\n", "tied is 1; it must be true or false."),
        ("m.yaml", SMALL.replace("8", "9"), "2 heads must divide the width 9"),
        ("m.yaml", SMALL.replace("8", "-8"), "width of a model is -8; it must be at least 1."),
        ("m.yaml", SMALL + "num_kv_heads: 3\n", "cannot have 3 key and value heads"),
        ("m.yaml", SMALL + "active_experts: 2\n", "2 active experts are more than the model's 1 experts"),
        ("m.yaml", "- 1", "must hold names with values"),
        ("m.yaml", "a: [", "cannot be read"),
        ("m.yaml", "a: !!python/object/apply:os.getcwd []", "cannot be read"),
        ("config.json", "{", "cannot be read"),
        ("config.json", {"model_type": "mamba"}, "a model of type 'mamba', which the planner does not know"),
        ("config.json", {}, "a model of type None"),
        ("config.json", GPT2 | {"n_layer": "12"}, "n_layer is '12'; it must be an integer."),
        ("config.json", {"model_type": "llama"}, "num_hidden_layers is None; it must be an integer."),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_one_sentence_with_its_name(tmp_path, name, content, sentence: str):
    with pytest.raises(WorkbookError) as refused:
        shape_of(written(tmp_path / name, content))
    said = str(refused.value)
    assert sentence in said and str(tmp_path / name) in said and "\n" not in said


@pytest.mark.parametrize("model", ["llama-3-9b", "missing.yaml", "missing/config.json"])
def test_a_model_that_does_not_exist_is_refused(model: str):
    with pytest.raises(WorkbookError, match=r"There is no (model 'llama-3-9b': choose|file missing)"):
        shape_of(model)

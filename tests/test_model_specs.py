"""The model specs against transformers and against what the models' publishers print."""

import copy
import inspect
import json
import re
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest
import torch
from records import on_record
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from memcalc.families import FAMILIES
from memcalc.inputs.model import load_model

SPEC_DIR = Path(__file__).resolve().parent.parent / "model_specs"
SPEC_PATHS = sorted(SPEC_DIR.glob("*.json"))

COUNT_KINDS = {"all", "without_embeddings"}
UNITS = {"": 1, "M": 10**6, "B": 10**9, "T": 10**12}

# What a model_type is trained as; all others are causal language models.
AUTO_CLASSES = {
    "bert": AutoModelForMaskedLM,
    "roberta": AutoModelForMaskedLM,
    "deberta-v2": AutoModelForMaskedLM,
    "modernbert": AutoModelForMaskedLM,
    "t5": AutoModelForSeq2SeqLM,
    "bart": AutoModelForSeq2SeqLM,
    "whisper": AutoModelForSpeechSeq2Seq,
    "resnet": AutoModelForImageClassification,
}

# Published config.json files still use the names that transformers 5 folds into
# `rope_parameters`, where each of them goes by the key given here.
LEGACY_ROPE_NAMES = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "partial_rotary_factor": "partial_rotary_factor",
    "rope_scaling": None,
    "rope_local_base_freq": "rope_theta",
    "global_rope_theta": "rope_theta",
    "local_rope_theta": "rope_theta",
}

# Where layers rotate differently, `rope_parameters` has a set for each kind of layer. These are of the sliding ones.
ROPE_NAMES_OF_SLIDING_LAYERS = {"rope_local_base_freq", "local_rope_theta"}

# They say nothing about size or shape, and would go stale unnoticed. Where `architectures` decides the loss it is there.
UNWANTED_FIELDS = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "init_std",
    "initializer_range",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def load_spec(path):
    return json.loads(path.read_text(encoding="utf-8"))


def parse_published(text):
    """A printed parameter count as (value, half of its last printed digit)."""
    match = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?([MBT]?)", text)
    if match is None:
        raise ValueError(f"not a printed parameter count: {text!r}")
    whole, fraction, unit = match.groups()
    number = Decimal(whole.replace(",", "") + (fraction or ""))
    last_digit = Decimal(1).scaleb(number.as_tuple().exponent)
    return number * UNITS[unit], last_digit * UNITS[unit] / 2


@cache
def transformers_source(config_class):
    """The files that define a model_type: its configuration and its model."""
    folder = Path(inspect.getfile(config_class)).parent
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


def as_config(given):
    return AutoConfig.for_model(**copy.deepcopy(given))


def as_model(given):
    with torch.device("meta"):
        model = AUTO_CLASSES.get(given["model_type"], AutoModelForCausalLM).from_config(as_config(given))
    model.tie_weights()
    return model


def count_parameters(model, kind):
    # A tied output layer is the same tensor as the input embedding, so identity is what counts it once.
    counted = {id(parameter): parameter for parameter in model.parameters()}
    if kind == "without_embeddings":
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        for table in [*tables, model.get_output_embeddings()]:
            counted.pop(id(table.weight), None)
    return sum(parameter.numel() for parameter in counted.values())


@on_record
def count(given, kind) -> int:
    """Parameters of transformers' own model."""
    return count_parameters(as_model(given), kind)


@pytest.fixture(params=SPEC_PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_there_are_specs():
    # The other tests run once per file, and so would all pass on an empty directory.
    assert len(SPEC_PATHS) >= 170


@pytest.mark.parametrize(
    ("text", "value", "half_last_digit"),
    [
        ("6.7B", 6_700_000_000, 50_000_000),
        ("13.0B", 13_000_000_000, 50_000_000),
        ("0.49B", 490_000_000, 5_000_000),
        ("175B", 175_000_000_000, 500_000_000),
        ("1T", 1_000_000_000_000, 500_000_000_000),
        ("124M", 124_000_000, 500_000),
        ("7,241,732,096", 7_241_732_096, Decimal("0.5")),
        ("20554567680", 20_554_567_680, Decimal("0.5")),
    ],
)
def test_parse_published(text, value, half_last_digit):
    assert parse_published(text) == (value, half_last_digit)


@pytest.mark.parametrize("text", ["", "7b", "7 B", "~7B", "7.B", "1,23B", "7K"])
def test_parse_published_refuses_what_it_cannot_read(text):
    with pytest.raises(ValueError):
        parse_published(text)


def test_spec_has_exactly_the_agreed_keys(path):
    spec = load_spec(path)
    assert set(spec) == {"aliases", "published", "config"}
    assert set(spec["published"]) == {"parameters", "counts", "source"}
    assert spec["published"]["source"].strip()
    assert spec["published"]["counts"] in COUNT_KINDS
    decides = {"architectures"} if spec["config"]["model_type"] in ("bert", "roberta") else set()
    assert not (UNWANTED_FIELDS - decides) & set(spec["config"])


def test_spec_gives_no_key_twice(path):
    # json keeps the last of two equal keys in silence.
    def refuse_duplicates(pairs):
        keys = [key for key, _ in pairs]
        assert len(keys) == len(set(keys)), keys
        return dict(pairs)

    json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=refuse_duplicates)


def test_names_and_aliases_are_unique():
    owners = {}
    for path in SPEC_PATHS:
        for name in [path.stem, *load_spec(path)["aliases"]]:
            owners.setdefault(name.lower(), []).append(path.stem)
    assert {name: stems for name, stems in owners.items() if len(stems) > 1} == {}


def test_name_is_plain(path):
    assert re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", path.stem)
    for alias in load_spec(path)["aliases"]:
        assert re.fullmatch(r"\S+", alias)


def test_config_has_no_field_transformers_does_not_know(path):
    given = load_spec(path)["config"]
    config = as_config(given)
    fields = set(type(config).__dataclass_fields__) | set(type(config).attribute_map) | {"model_type", "num_labels"}
    if hasattr(config, "rope_parameters"):
        fields |= set(LEGACY_ROPE_NAMES)
    # Some are read by name only: `getattr(config, "head_dim", ...)`, `kwargs.pop("sliding_window_pattern", ...)`.
    undeclared = {field for field in set(given) - fields if f'"{field}"' not in transformers_source(type(config))}
    assert undeclared == set()


def test_config_keeps_the_values_given(path):
    given = load_spec(path)["config"]
    config = as_config(given)
    for key, value in given.items():
        if key in LEGACY_ROPE_NAMES:
            rope = config.rope_parameters
            if isinstance(rope.get("full_attention"), dict):
                rope = rope["sliding_attention" if key in ROPE_NAMES_OF_SLIDING_LAYERS else "full_attention"]
            expected = value if key == "rope_scaling" else {LEGACY_ROPE_NAMES[key]: value}
            assert expected.items() <= rope.items(), key
        elif key == "sliding_window" and given.get("use_sliding_window") is False:
            assert not config.sliding_window
        elif key == "full_attention_interval":
            full = [kind == "full_attention" for kind in config.layer_types]
            assert full == [(layer + 1) % value == 0 for layer in range(config.num_hidden_layers)]
        elif key == "pos_att_type":
            assert getattr(config, key) == value.split("|")
        elif isinstance(value, dict):
            assert value.items() <= getattr(config, key).to_dict().items(), key
        else:
            assert getattr(config, key) == value, key


def test_count_agrees_with_the_published_one(path):
    spec = load_spec(path)
    published, half_last_digit = parse_published(spec["published"]["parameters"])
    counted = count(spec["config"], spec["published"]["counts"])
    assert abs(counted - published) <= half_last_digit, f"{counted:,} against {spec['published']['parameters']}"
    if spec["config"]["model_type"] in FAMILIES:
        assert load_model(path.stem).num_parameters == count(spec["config"], "all")

"""No two rows of a component share a name, whatever the model and the engine."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Case, model_types, step_cases
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import memcalc
from memcalc.core.rows import Item
from memcalc.estimation.names import with_names_of_their_own

CASES = [case for model_type in model_types() for case in step_cases(model_type)]


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """A setup of any engine that may or may not go with a model."""
    engine = draw(st.sampled_from(("none", "ddp", "deepspeed", "fsdp2", "megatron")))
    batch, gpus = draw(st.integers(1, 3)), 1 if engine == "none" else draw(st.sampled_from((1, 2, 4, 8)))
    stages = {"deepspeed": (0, 1, 2, 3), "fsdp2": (2, 3), "megatron": (0, 1)}
    precisions = ("fp32", "bf16-mixed", *(() if engine in ("deepspeed", "megatron") else ("bf16", "bf16-autocast")))
    optimizers = ("adamw", "sgd-momentum", *(() if engine in ("fsdp2", "megatron") else ("adafactor", "adamw-8bit")))
    split = draw(st.sampled_from(("", "tp", "pp", "cp", "ep"))) if gpus > 1 and engine in stages else ""
    return {
        "engine": engine,
        "gpus": gpus,
        "micro_batch_size": batch,
        "global_batch_size": gpus * batch * draw(st.sampled_from((1, 2))),
        "zero": draw(st.sampled_from(stages.get(engine, (0,)))),
        "precision": draw(st.sampled_from(precisions)),
        "optimizer": draw(st.sampled_from(optimizers)),
        "recompute": draw(st.sampled_from(("none", "full"))),
        "clip_grad_norm": draw(st.booleans()),
        **({split: 2} if split else {}),
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=st.sampled_from(CASES), setup=options())
def test_no_two_rows_of_a_component_share_a_name(case: Case, setup: dict[str, Any]) -> None:
    try:
        report = memcalc.estimate(dict(case.fields), seq_len=None if case.model_type == "resnet" else case.seq, **setup)
        names = [(item.component, item.name) for item in [*report.items, *report.overheads]]
    except memcalc.InputError:
        assume(False)
        return
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
    for share in report.to_dict()["communication"]["per_layer_items"]:
        assert share["payload"] > 0


@pytest.mark.parametrize(
    ("fields", "setup"),
    [
        ({"model_type": "gemma"}, {"precision": "fp32"}),
        ({"model_type": "roberta"}, {"precision": "fp32"}),
        ({"model_type": "qwen3_next"}, {"precision": "bf16-mixed"}),
        ({"model_type": "llama"}, {"precision": "bf16-mixed", "engine": "fsdp2", "gpus": 4}),
        ({"model_type": "mistral"}, {"precision": "bf16-mixed", "engine": "megatron", "gpus": 4, "tp": 2}),
    ],
    ids=str,
)
def test_rows_that_had_one_name(fields: dict[str, Any], setup: dict[str, Any]) -> None:
    case = step_cases(fields["model_type"])[0]
    report = memcalc.estimate(dict(case.fields), seq_len=case.seq, **setup)
    names = [(item.component, item.name) for item in report.items]
    assert len(set(names)) == len(names)


def item(dtype: str = "bf16", *shape: tuple[str, int]) -> Item:
    dims = "·".join(name for name, _ in shape)
    return Item("buffers", "x", 1, 1, shape, dtype, "always", f"{dims} = {dict(shape)}", "exact", "")


@pytest.mark.parametrize(
    ("items", "names"),
    [
        ([item("bf16", ("seq", 2))], ["x"]),
        ([item("bf16", ("seq", 2)), item("fp32", ("seq", 2))], ["x (bf16)", "x (fp32)"]),
        (
            [item("bf16", ("layers", 4), ("seq", 2)), item("bf16", ("copies", 4), ("batch", 1), ("seq", 2))],
            ["x (seq)", "x (batch·seq)"],
        ),
        (
            [item("bf16", ("seq", 2)), item("fp32", ("seq", 2)), item("fp32", ("batch", 2))],
            ["x (bf16, seq)", "x (fp32, seq)", "x (fp32, batch)"],
        ),
        ([item("bf16", ("ffn", 64)), item("bf16", ("ffn", 96))], ["x (ffn 64)", "x (ffn 96)"]),
        ([item("fp32"), item("fp32", ("seq", 2))], ["x (fp32)", "x (fp32, seq)"]),
    ],
)
def test_a_name_has_the_least_that_distinguishes(items: list[Item], names: list[str]) -> None:
    assert [one.name for one in with_names_of_their_own(items)] == names


MODERNBERT = {"model_type": "modernbert", "num_hidden_layers": 4, "vocab_size": 100, "pad_token_id": 0, "hidden_size": 64,
              "intermediate_size": 96, "num_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize(
    "setup", [{}, {"gpus": 2, "engine": "ddp"}, {"gpus": 2, "engine": "fsdp2"}, {"precision": "fp32"}], ids=str
)
def test_blocks_of_one_size_are_told_apart_by_their_number(setup: dict[str, Any]) -> None:
    """Adam's foreach step has temporaries of two layers in one block and of two in blocks of their own."""
    items = memcalc.estimate(MODERNBERT, seq_len=16, **setup).items
    names = [(item.component, item.name) for item in items]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("layers", [6, 32])
def test_what_equal_layers_send_is_one_row(layers: int) -> None:
    """Also where each layer makes its dims anew."""
    model = {"model_type": "phi", "num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 128,
             "num_attention_heads": 4, "vocab_size": 500}  # fmt: skip
    report = memcalc.estimate(model, gpus=8, engine="fsdp2", tp=2, sequence_parallel=True, seq_len=64)
    (row,) = (one for one in report.collectives if one.name == "input of self_attn" and one.phase == "forward")
    assert row.calls == row.layers == layers

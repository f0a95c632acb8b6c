"""Stages of models with experts, whose layers can differ: dense ones before those that route, windows in some of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from cases import DROPOUTS, step_cases
from stages_compared import KEPT, LLAMA, WORKLOAD, ZERO_2, Case, both, check, phases

import memcalc
from memcalc.engines.fsdp2 import pipeline as fsdp2_pipeline
from memcalc.tape.runs import NO_MIDDLE

SHORT = {"micro_batch_size": 2, "seq_len": 32}
"""Latent attention's kernel pads its logsumexp to 32 queries."""
RECOMPUTE: tuple[dict[str, Any], dict[str, Any]] = ({"recompute": "full"}, {"recompute": True})
CASES: dict[str, Case] = {
    "gpipe, first": Case("gpipe", 2, 0, 3),
    "1f1b, middle": Case("1f1b", 3, 1, 4),
    "1f1b, last, recompute": Case("1f1b", 2, 1, 3, options=RECOMPUTE[0], real=RECOMPUTE[1]),
    "interleaved, first": Case("interleaved", 2, 0, 4, chunks=2),
    "interleaved, last, zero 2": Case("interleaved", 2, 1, 2, chunks=2, options=ZERO_2, real=KEPT),
    "zero-bubble, first": Case("zero-bubble", 2, 0, 3, options=ZERO_2, real=KEPT),
    "zero-bubble, last, hybrid": Case(
        "zero-bubble", 2, 1, 3, dp=4, options=ZERO_2 | {"shard_group": 2}, real=KEPT | {"replicas": 2}
    ),
}


def mixed(model_type: str, layers: int) -> dict[str, Any]:
    """A small model whose layers are not all alike."""
    differ: dict[str, Any] = {
        "mixtral": {},
        "deepseek_v3": {"first_k_dense_replace": 2},
        "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
        "qwen2_moe": {"mlp_only_layers": [0, 3], "use_sliding_window": True, "sliding_window": 7, "layer_types": None},
        "gpt_oss": {"sliding_window": 9, "layer_types": None},
    }[model_type]
    fields = step_cases(model_type)[0].fields | dict.fromkeys(DROPOUTS, 0.0)
    return fields | {"num_hidden_layers": layers, "tie_word_embeddings": False} | differ


FEWER = [
    ("mixtral", "1f1b, middle"), ("mixtral", "zero-bubble, first"), ("qwen3_moe", "interleaved, last, zero 2"),
    ("qwen3_moe", "1f1b, last, recompute"), ("qwen2_moe", "gpipe, first"), ("gpt_oss", "interleaved, first"),
    ("gpt_oss", "zero-bubble, first"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "name"), [*(("deepseek_v3", name) for name in CASES), *FEWER])
def test_a_step(model_type: str, name: str) -> None:
    case = CASES[name]
    real = case.real | {"attention": "eager" if model_type == "gpt_oss" else "sdpa"}
    check(*both(case._replace(real=real, workload=SHORT), mixed(model_type, 6 if case.chunks == 1 else 7)))


def test_windows_in_some_layers_of_a_dense_model() -> None:
    windows = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 4}
    check(*both(Case("1f1b", 2, 1, 3), LLAMA | windows | {"num_hidden_layers": 6}))


DEEP: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("mixtral", {}, {"pp": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 3}, {"pp": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 2}, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}),
    ("qwen3_moe", {"decoder_sparse_step": 3, "mlp_only_layers": []}, {"pp": 2, "recompute": "full"}),
    ("gpt_oss", {"layer_types": None}, {"pp": 2, "zero": 2, "schedule": "zero-bubble"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "fields", "options"), DEEP)
def test_the_middle_of_a_stack_repeats_itself_whatever_comes_first(
    model_type: str, fields: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = step_cases(model_type)[0].fields | dict.fromkeys(DROPOUTS, 0.0)
    config |= {"num_hidden_layers": 48, "tie_word_embeddings": False} | fields
    setup = {"engine": "fsdp2", "zero": 3, "gpus": 4, "global_batch_size": 12, **SHORT} | options

    def ranks_of() -> list[Any]:
        report = memcalc.estimate(dict(config), **setup)
        return [(phases(one), one.collectives, one.rank.profiles[0].run.middle.more) for one in report.each_rank()]

    few = ranks_of()
    assert all(more for *_, more in few)
    monkeypatch.setattr(fsdp2_pipeline, "middle_of", lambda _: NO_MIDDLE)
    assert [one[:2] for one in ranks_of()] == [one[:2] for one in few]


def test_dense_layers_are_units_of_another_size() -> None:
    report = memcalc.estimate(
        "deepseek-v3", engine="fsdp2", zero=3, gpus=64, pp=2, global_batch_size=256, pp_rank=0, **WORKLOAD
    )
    calls = {c.name: c.calls for c in report.collectives if c.collective == "reduce_scatter"}
    assert calls == {
        "gradients, dense layers": 3, "gradients, layers with experts": 28, "gradients, outside the layers": 1,
    }  # fmt: skip
    kinds = {c.name: c.shares.kinds for c in report.collectives if c.shares is not None}
    assert {name: [kind.layers for kind in of] for name, of in kinds.items() if name.startswith("gradients")} == {
        "gradients, dense layers": [3], "gradients, layers with experts": [28],
    }  # fmt: skip


def test_transformers_dispatches_no_tokens_in_a_pipeline() -> None:
    """Why `--ep` is refused with `--pp`."""
    from transformers.distributed import DistributedConfig

    for degrees, refused in (({}, False), ({"pp_size": 2}, True)):
        config = DistributedConfig(ep_size=2, tp_size=2, **degrees)
        with pytest.raises(ValueError, match="token dispatch with pipeline") if refused else nullcontext():
            config._validate_resolved_ep_plan({"layers.*.mlp.experts": "ep_dispatch_experts"})


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("mixtral-8x7b", {"ep": 2}, "--ep 2: with engine fsdp2 and pp 2 transformers itself refuses to dispatch tokens"),
        (step_cases("granitemoe")[0].fields, {}, "--pp 2: with engine fsdp2 for a granitemoe is not modelled"),
        (
            mixed("mixtral", 4) | {"output_router_logits": True},
            {},
            "--pp 2: with output_router_logits of mixtral: the last stage's loss is of its output alone",
        ),
        (
            step_cases("phimoe")[0].fields | {"tie_word_embeddings": False, "num_hidden_layers": 4},
            {"zero": 2, "schedule": "zero-bubble"},
            "--schedule zero-bubble: with engine fsdp2 for a phimoe is not modelled",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_refused_by_name(model: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **{"engine": "fsdp2", "zero": 3, "gpus": 4, "pp": 2, "global_batch_size": 8} | options)
    assert line in str(error.value)
    assert "\n" not in str(error.value)

"""What one layer sends, against the sums that sizing interviews ask for."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from command import here

import memcalc
from memcalc.layout.collectives import Collective
from memcalc.report.per_layer import calls_of, shares, show_calls
from memcalc.report.table import print_report

H, FFN, KV = 4096, 14336, 1024
LAYER = 2 * H * H + 2 * H * KV + 3 * H * FFN + 2 * H  # llama-3-8b's


def of(axis: str, **options: Any) -> list[Collective]:
    report = memcalc.estimate("llama-3-8b", seq_len=4096, **options)
    return [
        s.collective._replace(calls=round(s.calls), payload=s.payload)
        for s in shares(report)
        if s.collective.axis == axis
    ]


def test_tensor_parallelism_is_eight_bsh() -> None:
    """Four all-reduces of bsh, each a reduce-scatter and an all-gather."""
    calls = of("tp", gpus=8, tp=8, sequence_parallel=False, micro_batch_size=2, global_batch_size=8)
    assert [(c.collective, c.calls, c.payload) for c in calls] == [("all_reduce", 1, 2 * 4096 * H * 2)] * 4


def test_sequence_parallelism_gathers_twice_more() -> None:
    calls = of("tp", gpus=8, tp=8, micro_batch_size=2, global_batch_size=8)
    assert sorted(c.collective for c in calls) == ["all_gather"] * 6 + ["reduce_scatter"] * 4
    assert {c.payload for c in calls} == {2 * 4096 * H * 2}


@pytest.mark.parametrize(
    ("options", "per_parameter"),
    [
        ({"gpus": 8}, {"all_reduce": 2}),
        ({"gpus": 8, "zero": 3, "engine": "fsdp2"}, {"all_gather": 4, "reduce_scatter": 4}),
        ({"gpus": 8, "zero": 1, "engine": "megatron"}, {"all_gather": 2, "reduce_scatter": 4}),
        ({"gpus": 16, "tp": 2, "zero": 1}, {"all_gather": 1, "reduce_scatter": 2}),
    ],
)
def test_data_parallelism_is_the_layers_parameters(options: dict[str, Any], per_parameter: dict[str, int]) -> None:
    sent: dict[str, int] = {}
    for c in of("dp", **options):
        sent[c.collective] = sent.get(c.collective, 0) + c.payload
    for kind, nbytes in per_parameter.items():
        assert sent[kind] == pytest.approx(nbytes * LAYER, rel=2e-4)  # tensor-parallel ranks all have the norms


@pytest.mark.parametrize(
    ("engine", "stages"), [("megatron", 1), ("megatron", 4), ("fsdp2", 1), ("fsdp2", 2), ("deepspeed", 1)]
)
def test_a_pipeline_is_two_bsh(engine: str, stages: int) -> None:
    """bsh to the next stage and bsh back, of every chunk in the middle, with each micro-batch."""
    schedule = "interleaved" if stages > 1 else "1f1b"
    options: dict[str, Any] = {"engine": engine, "virtual_stages": stages, "schedule": schedule, "pp_rank": 1}
    options |= (
        {"model": "llama-7b", "seq_len": 512} if engine == "deepspeed" else {"model": "llama-3-8b", "seq_len": 512}
    )
    report = memcalc.estimate(**options, gpus=4, pp=4, global_batch_size=8, zero=3 if engine == "fsdp2" else 0)
    sent = [s for s in shares(report) if s.collective.axis == "pp"]
    whole = sum(s.payload for s in sent)
    boundaries = 2 * stages  # the second of four ranks has neither end
    assert whole == boundaries * 512 * 4096 * 2


@pytest.mark.parametrize(
    ("options", "parts"), [({}, 1), ({"cp": 2}, 2), ({"tp": 2, "sequence_parallel": True}, 2), ({"tp": 2}, 1)], ids=str
)
def test_what_goes_between_stages_of_torch_says_which_part(options: dict[str, Any], parts: int) -> None:
    """A part of a sequence is no whole one in the formula either."""
    report = memcalc.estimate(
        "llama-3-8b", engine="fsdp2", zero=3, gpus=8, pp=4, seq_len=512, global_batch_size=8, **options
    )
    sent = [s for s in shares(report) if s.collective.axis == "pp"]
    assert {s.payload for s in sent} == {512 * 4096 * 2 // parts}
    assert {s.formula == "batch·seq·hidden·2 B" for s in sent} == {parts == 1}


def test_chunks_of_a_rank_send_as_one() -> None:
    options: dict[str, Any] = {"gpus": 8, "tp": 2, "pp": 2, "global_batch_size": 8, "seq_len": 512}
    whole = memcalc.estimate("llama-7b", **options)
    chunks = memcalc.estimate("llama-7b", schedule="interleaved", virtual_stages=4, **options)
    of_layers = [
        {(c.axis, c.phase, c.name, c.collective): (c.calls, c.payload) for c in report.collectives if c.layer}
        for report in (whole, chunks)
    ]
    assert of_layers[0] == of_layers[1]
    keys = [(c.axis, c.phase, c.name, c.collective, c.layer) for c in chunks.collectives]
    assert len(keys) == len(set(keys))
    assert {s.calls for s in shares(chunks) if s.collective.axis == "tp"} == {1}


@pytest.mark.parametrize("options", [{"engine": "megatron"}, {"engine": "fsdp2", "zero": 3}, {"engine": "deepspeed"}])
def test_layers_with_experts_are_not_averaged_with_dense_ones(options: dict[str, Any]) -> None:
    """Three of DeepSeek-V3's 61 layers are dense."""
    report = memcalc.estimate("deepseek-v3", gpus=64, ep=64, seq_len=512, **options)
    sent = [s for s in shares(report) if s.collective.axis == "ep" and "tokens to" in s.collective.name]
    assert sent
    for share in sent:
        assert share.collective.layers == 58
        assert share.calls * 58 == share.collective.calls
        assert share.payload * 58 == share.collective.payload


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    shown = here(capsys, "estimate", "-m", "llama-7b", "--gpus", "4", "--tp", "4", "--per-layer").stdout
    table = shown.split("Communication of one layer")[1]
    assert "batch·seq·hidden" in table
    assert "tp    all" in table
    nothing = here(capsys, "estimate", "-m", "gpt2", "--per-layer").stdout
    assert "per layer: no layer sends anything" in nothing


@pytest.mark.parametrize(
    "options", [{}, {"zero": 1}, {"zero": 3}, {"tp": 2}, {"tp": 2, "zero": 3, "engine": "fsdp2"}], ids=str
)
@pytest.mark.parametrize("columns", [80, 140])
def test_nothing_is_called_a_fraction_of_a_time(
    options: dict[str, Any], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket has the gradients of several layers, so a layer's bytes are a part of calls."""
    monkeypatch.setenv("COLUMNS", str(columns))
    report = memcalc.estimate("llama-3-8b", gpus=8, seq_len=512, **options)
    file = io.StringIO()
    print_report(report, rows=False, per_layer=True, verbose=False, file=file)
    table = file.getvalue().split("Communication of one layer")[1]
    assert not re.search(r" \d*\.\d+ +\d+\.\d+ [KMG]iB", table)
    shared = [s for s in shares(report) if not s.has_own_calls]
    assert len(re.findall(r" part +\d", table)) >= len(shared)
    assert ("calls that layers share" in " ".join(table.split())) is bool(shared)
    assert all(calls_of(s) == "part" for s in shared)
    assert [calls_of(s) for s in shares(report) if s.has_own_calls] == [
        str(round(s.calls)) for s in shares(report) if s.has_own_calls
    ]


def test_own_calls_and_parts_are_told_apart_in_a_sum() -> None:
    assert [show_calls(n, has_part=part) for n, part in ((3, False), (3, True), (0, True))] == ["3", "3+part", "part"]


def test_gradients_are_those_of_a_step_however_many_micro_batches_it_has() -> None:
    """FSDP2 gathers and reduces in every one of four, where it is not to wait for the last."""
    options = {"gpus": 8, "zero": 3, "engine": "fsdp2", "sync_each_micro_batch": True}
    one, four = (of("dp", **options, global_batch_size=8 * n) for n in (1, 4))
    assert [(c.calls, c.payload) for c in four] == [(4 * c.calls, 4 * c.payload) for c in one]


LLAMA_3_8B = "3·ffn·hidden + 2·heads·head_dim·hidden + 2·kv_heads·head_dim·hidden + 2·hidden"


@pytest.mark.parametrize(
    ("options", "formulas"),
    [
        ({"gpus": 8}, [f"({LLAMA_3_8B})·2 B"]),
        (
            {"gpus": 8, "zero": 3, "engine": "fsdp2", "global_batch_size": 24},
            [f"3·({LLAMA_3_8B})·2 B", f"3·({LLAMA_3_8B})·2 B", f"({LLAMA_3_8B})·4 B"],
        ),
        (
            {"gpus": 8, "zero": 2, "engine": "fsdp2", "shard_group": 2},
            [f"({LLAMA_3_8B})·2 B", f"({LLAMA_3_8B})·4 B", f"({LLAMA_3_8B})/2·4 B"],
        ),
        ({"gpus": 8, "zero": 1, "engine": "deepspeed"}, [f"({LLAMA_3_8B})·2 B"] * 2),
    ],
    ids=str,
)
def test_gradients_and_weights_are_in_named_dims(options: dict[str, Any], formulas: list[str]) -> None:
    report = memcalc.estimate("llama-3-8b", seq_len=512, **options)
    assert [s.formula for s in shares(report)] == formulas


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 8},
        {"gpus": 64, "zero": 3, "engine": "fsdp2", "shard_group": 8},
        {"gpus": 64, "zero": 3, "engine": "fsdp2", "ep": 8},
        {"gpus": 64, "zero": 3, "engine": "fsdp2", "ep": 64},
        {"gpus": 512, "zero": 3, "engine": "fsdp2", "ep": 8},
        {"gpus": 64, "zero": 1, "engine": "deepspeed"},
        {"gpus": 64, "zero": 3, "engine": "deepspeed"},
        {"gpus": 64, "zero": 2, "engine": "deepspeed", "ep": 8},
        {"gpus": 64, "zero": 1, "engine": "megatron", "tp": 2, "ep": 8},
        {"gpus": 64, "zero": 1, "engine": "megatron", "ep": 8, "pp": 2, "pp_rank": 0, "last_stage_layers": 30},
        {"gpus": 64, "zero": 3, "engine": "fsdp2", "pp": 2, "global_batch_size": 64},
    ],
    ids=str,
)
def test_a_formula_has_the_payload(options: dict[str, Any]) -> None:
    """Evaluated with the model's dims; dense layers and those with experts are not averaged."""
    report = memcalc.estimate("deepseek-v3", seq_len=512, **options)
    c = {"hidden": 7168, "ffn": 18432, "experts": 256, "expert_ffn": 2048, "shared_ffn": 2048, "heads": 128}
    c |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 192, "qk_nope_head_dim": 128}
    c |= {"v_head_dim": 128, "tp": report.setup.tp, "ep": report.setup.ep, "etp": report.setup.etp or 1}
    of_weights = [s for s in shares(report) if s.collective.shares is not None]
    assert of_weights
    for share in of_weights:
        counted = re.sub(r"\(.*, padded to (\d+)\)", r"\1", share.formula.removesuffix(" B")).replace("·", "*")
        assert eval(counted, {"__builtins__": {}}, c) == pytest.approx(share.payload, rel=5e-4)  # to four digits


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (
            "llama-7b",
            {"gpus": 16, "pp": 4, "zero": 3, "shard_group": 2, "micro_batch_size": 2, "global_batch_size": 64},
        ),
        (
            "qwen2.5-7b",
            {
                "gpus": 8,
                "tp": 2,
                "pp": 2,
                "sequence_parallel": True,
                "zero": 2,
                "micro_batch_size": 2,
                "global_batch_size": 64,
            },
        ),
        ("jamba-v0.1", {"gpus": 2, "engine": "ddp"}),
        ("whisper-small", {"gpus": 2, "engine": "ddp"}),
        ("whisper-small", {"gpus": 2, "engine": "deepspeed", "zero": 2}),
        ("whisper-small", {"gpus": 2, "engine": "deepspeed", "zero": 0}),
        ({"model_type": "bert", "tie_word_embeddings": False}, {"gpus": 2, "engine": "deepspeed", "zero": 2}),
        ({"model_type": "bert", "tie_word_embeddings": False}, {"gpus": 2, "engine": "deepspeed", "zero": 1}),
    ],
    ids=str,
)
def test_formulas_of_many_kinds_have_the_payload(model: Any, options: dict[str, Any]) -> None:
    """With the sizes of the dims as the rows of the same report name them. None is a fraction: what has no gradient, or wants
    none, is no part of what gradients are a share of."""
    report = memcalc.estimate(model, seq_len=448, **{"engine": "fsdp2", **options})
    sizes = {name: size for item in report.items for name, size in item.shape if name.isidentifier()}
    sizes |= {axis: getattr(report.setup, axis) for axis in ("tp", "cp", "ep")}
    checked = 0
    for share in shares(report):
        words = share.formula.removesuffix(" B").replace("·", "*")
        if set(re.findall(r"[a-z_]\w*", words)) <= sizes.keys():
            assert eval(words, {"__builtins__": {}}, sizes) == pytest.approx(share.payload, rel=5e-4)
            assert not re.match(r"\d+\.", words)
            checked += 1
    assert checked


def test_what_a_layer_sends_once_a_step_is_not_divided_by_micro_batches() -> None:
    """A stage's norms under sequence parallelism: their gradients are summed over tp when all micro-batches are done."""
    report = memcalc.estimate(
        "qwen2.5-7b",
        gpus=8,
        tp=2,
        pp=2,
        sequence_parallel=True,
        engine="fsdp2",
        zero=2,
        seq_len=512,
        global_batch_size=32,
    )
    norms = [s for s in shares(report) if s.collective.axis == "tp" and "norm" in s.collective.name]
    assert [(s.calls, s.payload, s.formula) for s in norms] == [(1, 3584 * 4, "hidden·4 B")] * 2


def test_what_a_layer_sends_twice_says_so() -> None:
    """Keys and values are gathered by a call each."""
    report = memcalc.estimate("qwen3-0.6b", gpus=4, cp=2, engine="fsdp2", zero=3, recompute="full", seq_len=512)
    sent = [s for s in shares(report) if s.collective.axis == "cp"]
    assert {s.calls for s in sent} == {1, 2}
    assert all(s.formula.startswith("2·") is (s.calls == 2) for s in sent)


@pytest.mark.slow
def test_a_traced_model_has_the_layers_that_it_has() -> None:
    """The language model of an encoder-decoder configuration can be its decoder alone."""
    mbart = {"model_type": "mbart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 96,
             "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 100}  # fmt: skip
    report = memcalc.estimate(mbart, gpus=2, engine="deepspeed", zero=3, seq_len=16)
    assert report.rank.layers == 3
    assert sum(kind.layers for kind in report.collectives[0].shares.kinds) == 3  # type: ignore[union-attr]

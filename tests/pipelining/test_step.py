"""A rank's step against torch.distributed.pipelining over transformers' model and `fully_shard`: every phase's peak and
everything sent, byte for byte, on any rank of a fake process group."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from cases import DROPOUTS, step_cases
from pipeline_oracle import pipeline_step
from stages_compared import KEPT, LLAMA, SHALLOW, WORKLOAD, ZERO_2, Case, both, check, phases

import memcalc
from memcalc.engines.fsdp2 import pipeline as fsdp2_pipeline
from memcalc.estimation.report import Report
from memcalc.families import supporting
from memcalc.pipelining.programs import divided
from memcalc.report.table import print_report
from memcalc.tape.runs import NO_MIDDLE

STAGED = supporting(lambda s: s.stages)
NOT_IN_HALVES = supporting(lambda s: not s.halves)

CASES: dict[str, Case] = {
    "gpipe, first": Case("gpipe", 3, 0, 2),
    "gpipe, last": Case("gpipe", 2, 1, 3, dp=1),
    "1f1b, first": Case("1f1b", 3, 0, 4),
    "1f1b, middle": Case("1f1b", 3, 1, 5),
    "1f1b, last": Case("1f1b", 3, 2, 4),
    "zero 2": Case("1f1b", 2, 0, 3, options=ZERO_2, real=KEPT),
    "fp32": Case("1f1b", 2, 1, 3, options={"precision": "fp32"}, real={"policy": None}),
    "bf16": Case("1f1b", 2, 0, 3, options={"precision": "bf16"}, real={"policy": None, "dtype": torch.bfloat16}),
    "reduced in bf16": Case("1f1b", 2, 1, 3, options={"grad_dtype": "bf16"}, real={"reduced": torch.bfloat16}),
    "recompute": Case("1f1b", 2, 0, 3, options={"recompute": "full"}, real={"recompute": True}),
    "recompute op": Case("1f1b", 2, 0, 3, options={"recompute": "op"}, real={"recompute": "op"}),
    "recompute op, interleaved": Case(
        "interleaved", 2, 1, 2, dp=1, chunks=2, options={"recompute": "op"}, real={"recompute": "op"}
    ),
    "eager": Case("1f1b", 2, 1, 3, options={"attention": "eager"}, real={"attention": "eager"}),
    "hybrid": Case("1f1b", 2, 1, 2, dp=4, options={"shard_group": 2}, real={"replicas": 2}, workload=SHALLOW),
    "few tokens": Case("1f1b", 2, 0, 2, workload=SHALLOW),
    "few tokens, last, zero 2": Case("gpipe", 2, 1, 2, options=ZERO_2, real=KEPT, workload=SHALLOW),
    "interleaved, first": Case("interleaved", 2, 0, 4, chunks=2),
    "interleaved, last, zero 2": Case("interleaved", 2, 1, 3, chunks=2, options=ZERO_2, real=KEPT),
    "zero-bubble, first": Case("zero-bubble", 2, 0, 3, options=ZERO_2, real=KEPT),
    "zero-bubble, last": Case("zero-bubble", 2, 1, 4, options=ZERO_2, real=KEPT),
    "zero-bubble, middle, fp32": Case(
        "zero-bubble", 3, 1, 3, dp=1, options={**ZERO_2, "precision": "fp32"}, real={**KEPT, "policy": None}
    ),
    "zero-bubble, two chunks": Case("zero-bubble", 2, 1, 3, chunks=2, options=ZERO_2, real=KEPT),
    "zero-bubble, one micro-batch": Case("zero-bubble", 2, 1, 1, options=ZERO_2, real=KEPT),
    "zero-bubble, one micro-batch, one GPU a stage": Case("zero-bubble", 2, 1, 1, dp=1, options=ZERO_2, real=KEPT),
    "zero-bubble, few tokens": Case("zero-bubble", 2, 1, 3, options=ZERO_2, real=KEPT, workload=SHALLOW),
    "interleaved, four chunks": Case("interleaved", 2, 1, 2, chunks=4, workload=SHALLOW),
    "interleaved, four chunks, zero 2": Case(
        "interleaved", 2, 0, 4, chunks=4, options=ZERO_2, real=KEPT, workload=SHALLOW
    ),
    "interleaved, few tokens": Case("interleaved", 2, 1, 2, chunks=2, workload=SHALLOW),
    "interleaved, few tokens, one GPU a stage": Case("interleaved", 2, 0, 2, dp=1, chunks=2, workload=SHALLOW),
    "few tokens, last, reduced in bf16": Case(
        "1f1b", 2, 1, 9, dp=1, options={"grad_dtype": "bf16"}, real={"reduced": torch.bfloat16}, workload=SHALLOW
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step(name: str) -> None:
    case = CASES[name]
    report, real = both(case, LLAMA | {"num_hidden_layers": {1: 5, 2: 6, 4: 8}[case.chunks]})
    check(report, real)


@pytest.mark.parametrize("model_type", [model_type for model_type in STAGED if model_type != "llama"])
def test_a_step_of_another_family(model_type: str) -> None:
    case = step_cases(model_type)[0]
    fields = case.fields | {"num_hidden_layers": 2, "tie_word_embeddings": False} | dict.fromkeys(DROPOUTS, 0.0)
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq}
    halves = "1f1b" if model_type in NOT_IN_HALVES else "zero-bubble"
    real = KEPT | {"attention": memcalc.load_model(dict(fields)).program.attention_kinds[0]}
    check(*both(Case(halves, 2, 1, 2, dp=1, options=ZERO_2, real=real, workload=workload), fields))


def test_gradients_that_come_together_are_there_until_the_next_ones() -> None:
    """Of an MLP without a gate the two weights' gradients are large beside the rest."""
    fields = step_cases("starcoder2")[0].fields | {"num_hidden_layers": 3, "tie_word_embeddings": False}
    check(
        *both(
            Case("zero-bubble", 3, 1, 3, options=ZERO_2, real=KEPT, workload=SHALLOW),
            fields | {"intermediate_size": 400},
        )
    )


def test_llama_7b() -> None:
    config = {"model_type": "llama", "vocab_size": 32000, "tie_word_embeddings": False}  # the defaults are the 7B's
    report, real = both(Case("1f1b", 16, 0, 17, dp=8, workload={"micro_batch_size": 1, "seq_len": 2048}), config)
    check(report, real)


MANY: list[tuple[str, int, int, int]] = [
    ("gpipe", 2, 8, 1),
    ("gpipe", 3, 9, 1),
    ("1f1b", 2, 7, 1),
    ("interleaved", 2, 8, 2),
    ("zero-bubble", 2, 8, 1),
    ("1f1b", 3, 9, 1),
    ("1f1b", 2, 12, 1),
    ("interleaved", 2, 12, 2),
    ("interleaved", 3, 15, 3),
    ("interleaved", 5, 24, 2),  # rounds of six
    ("zero-bubble", 2, 10, 1),
    ("zero-bubble", 4, 20, 1),
    ("zero-bubble", 3, 18, 2),
    ("zero-bubble", 5, 24, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ranks", "micro_batches", "chunks"), MANY)
def test_the_middle_of_a_step_and_of_a_stage_repeats_itself(
    schedule: str, ranks: int, micro_batches: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of fewer micro-batches and layers has every peak of the whole step, and says what it is made of."""
    layers = ranks * chunks * (8 if micro_batches < 9 else 1)
    config = LLAMA | {"num_hidden_layers": layers + (layers > 10 and chunks == 1), "vocab_size": 300}
    halves = schedule == "zero-bubble"
    setups: list[dict[str, Any]] = [
        {"zero": 2, **SHALLOW},
        {"zero": 2 if halves else 3, "tp": 2, "sequence_parallel": True, "micro_batch_size": 2, "seq_len": 32},
        {"zero": 2 if halves else 3, "recompute": "none" if halves else "full", "precision": "fp32", **WORKLOAD},
    ]

    def ranks_of(options: dict[str, Any]) -> list[Any]:
        report = memcalc.estimate(
            config, engine="fsdp2", gpus=2 * ranks * options.get("tp", 1), pp=ranks, schedule=schedule, virtual_stages=chunks,
            global_batch_size=2 * micro_batches * options["micro_batch_size"], **options,
        )  # fmt: skip
        return [(phases(one), components(one), one.collectives) for one in report.each_rank()]

    setups = setups if layers > 10 else setups[:1]
    few = [ranks_of(setup) for setup in setups]
    monkeypatch.setattr(fsdp2_pipeline, "enough_micro_batches", lambda *given: given[3])
    monkeypatch.setattr(fsdp2_pipeline, "middle_of", lambda _: NO_MIDDLE)
    assert [ranks_of(setup) for setup in setups] == few


def components(report: Report) -> dict[str, tuple[int, int]]:
    """Of each, the most and what is alive at the peak. Losses are the graph's or the caller's."""
    out: dict[str, tuple[int, int]] = {}
    for item in report.items:
        if "loss" not in item.name:
            most, at_peak = out.get(item.component, (0, 0))
            out[item.component] = most + item.nbytes, at_peak + item.at_peak
    return out


def test_a_backward_in_halves_gives_resharded_layers_no_gradient() -> None:
    """Why zero-bubble is refused with --zero 3: of a stage with two layers fewer are reduced."""
    case = Case("zero-bubble", 2, 1, 2, real={"policy": None}, workload=SHALLOW)
    spans_of_two = [[(0, 2)], [(2, 2)]]
    fields = LLAMA | {"num_hidden_layers": 4}
    reduced = [
        sum(
            kind == "reduce_scatter"
            for kind, _, _ in pipeline_step(
                fields, schedule="zero-bubble", rank=1, micro_batches=2, dp=2, spans=spans_of_two, reshards=reshards,
                **case.workload,
            ).sent
        )
        for reshards in (False, None)
    ]  # fmt: skip
    assert reduced[0] == 3 > reduced[1]


def refused(config: dict[str, Any] | str = "llama-7b", **options: Any) -> str:
    setup: dict[str, Any] = {"engine": "fsdp2", "zero": 3, "gpus": 4, "pp": 2, "global_batch_size": 8}
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(config, **setup | options)
    return str(error.value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"global_batch_size": 2},
        "--schedule 1f1b: torch's Schedule1F1B needs at least 2 micro-batches (one for each stage), not 1; ",
    ),
    ({"tp": 3, "gpus": 6}, "--tp 3: llama-7b has 32 attention heads, and transformers' tensor parallelism"),
    (
        {"schedule": "zero-bubble"},
        "--schedule zero-bubble: with --zero 3, the default of fsdp2, torch takes a stage's ",
    ),
    (
        {"schedule": "zero-bubble", "zero": 2, "recompute": "full"},
        "--recompute full: with schedule zero-bubble torch recomputes a layer for its input and again for each weight, ",
    ),
    ({"schedule": "interleaved"}, "--virtual-stages 1: does not go with schedule interleaved; allowed: 2 or more"),
    ({"virtual_stages": 2}, "--virtual-stages 2: does not go with schedule 1f1b; "),
    ({"gpus": 2, "pp": 1, "virtual_stages": 2}, "--virtual-stages 2: needs a pipeline (--pp 2 or more)"),
    (
        {"schedule": "interleaved", "virtual_stages": 2, "global_batch_size": 14},
        "--schedule interleaved: 7 micro-batches do not make 3 equal rounds; allowed: another --global-batch-size",
    ),
    ({"precision": "bf16-autocast"}, "--precision bf16-autocast: with engine fsdp2 and pp above 1 is not modelled"),
    ({"padded": True}, "--padded on: with engine fsdp2 and pp above 1 is not modelled"),
    ({"kernels": "fused"}, "--kernels fused: with engine fsdp2 and pp above 1 is not modelled"),
    ({"cross_entropy": "chunked"}, "--cross-entropy chunked: with engine fsdp2 and pp above 1 is not modelled"),
    ({"gpus": 64, "pp": 64, "global_batch_size": 64}, "--pp 64: llama-7b: 32 layers do not make 64 stages; "),
    ({"first_stage_layers": 32}, "--first-stage-layers 32: llama-7b: 32 layers do not make 2 stages; "),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    assert refused(**options).startswith(text)


def test_which_models_are_refused() -> None:
    tied = refused(LLAMA | {"tie_word_embeddings": True})
    assert "has tied embeddings, which the first and the last stage would train separately" in tied
    assert tied.endswith("allowed: 1, or a config with tie_word_embeddings false")
    assert refused({"model_type": "gpt2"}).startswith("--pp 2: with engine fsdp2 for a gpt2 is not modelled")
    with pytest.raises(
        memcalc.InputError, match=r"^--pp 2: with engine fsdp2 a bare number of parameters has no stages"
    ):
        memcalc.estimate(params="7B", engine="fsdp2", zero=3, gpus=4, pp=2)


def test_layers_are_divided_evenly_or_as_torchtitan_does_it() -> None:
    assert divided(32, 4) == [8, 8, 8, 8]
    assert divided(30, 4) == [7, 8, 8, 7]
    assert divided(31, 4) == [8, 8, 8, 7]
    assert divided(126, 16) == [7, *[8] * 14, 7]
    assert divided(33, 4) == [8, 9, 9, 7]
    assert divided(32, 4, first=5) == [5, 9, 9, 9]
    assert divided(32, 4, 5, 6) == [5, 11, 10, 6]
    assert divided(5, 2, 2, 3) == [2, 3]
    with pytest.raises(ValueError, match="3 layers do not make 4 stages"):
        divided(3, 4)


def test_a_rank_is_the_estimate_of_that_rank_and_all_are_the_whole_model() -> None:
    options: dict[str, Any] = {
        "engine": "fsdp2", "zero": 2, "gpus": 6, "pp": 3, "schedule": "zero-bubble", "global_batch_size": 8, **WORKLOAD,
    }  # fmt: skip
    ranks = memcalc.estimate(LLAMA, **options).to_dict()["memory"]["ranks"]
    assert [rank["layers"] for rank in ranks] == [2, 2, 1]
    for rank in ranks:
        alone = memcalc.estimate(LLAMA, **options, pp_rank=rank["pp"]).to_dict()
        assert alone["memory"]["ranks"] == [rank]
        memory = alone["memory"]
        assert sum(item["at_peak"] for item in memory["items"]) == memory["peak"]


def test_in_flight() -> None:
    for schedule, zero, chunks, in_flight in (
        ("gpipe", 3, 1, [4, 4]), ("1f1b", 3, 1, [2, 1]), ("interleaved", 3, 2, [5, 3]), ("zero-bubble", 2, 1, [2, 2]),
    ):  # fmt: skip
        report = memcalc.estimate(
            LLAMA | {"num_hidden_layers": 4}, engine="fsdp2", zero=zero, gpus=2, pp=2, schedule=schedule,
            virtual_stages=chunks, global_batch_size=8, **WORKLOAD,
        )  # fmt: skip
        assert [rank["in_flight"] for rank in report.to_dict()["memory"]["ranks"]] == in_flight


def test_the_table_says_how_layers_are_divided_and_what_waits() -> None:
    options: dict[str, Any] = {"engine": "fsdp2", "zero": 3, "gpus": 4, "pp": 2, "global_batch_size": 8, **WORKLOAD}
    file = io.StringIO()
    print_report(memcalc.estimate(LLAMA, **options), rows=False, file=file)
    text = " ".join(file.getvalue().split())
    assert "layers of each stage: 3, 2" in text
    assert "1f1b, 2 micro-batches: the bubble is 50.0% of the ideal time" in text


@pytest.mark.live
def test_why_a_backward_in_halves_recomputes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for the gradients of a stage's weights one after the other: each recomputes the layer (checkpoint.py keys what
    it has recomputed by the backward). A selective checkpoint takes a second backward for an error."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def case(recompute: bool | str) -> Case:
        return Case(
            "zero-bubble", 2, 1, 2, dp=1, options=ZERO_2, real={**KEPT, "recompute": recompute}, workload=SHALLOW
        )

    runs: list[int] = []
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: runs.append(1) or forward(self, x))
    fields = LLAMA | {"num_hidden_layers": 4}
    both(case(False), fields)
    once = len(runs)
    both(case(True), fields)
    assert len(runs) - once > 5 * once  # run, and run again
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        both(case("op"), fields)


@pytest.mark.parametrize(
    ("recompute", "line"),
    [
        ("op", "--recompute op: with schedule zero-bubble torch fails: .*; allowed: none, or another --schedule"),
        ("full", "--recompute full: with schedule zero-bubble torch recomputes .* again for each weight"),
    ],
)
def test_halves_with_recomputation_are_refused(recompute: str, line: str) -> None:
    setup: dict[str, Any] = {
        "engine": "fsdp2",
        "gpus": 4,
        "pp": 2,
        "zero": 2,
        "schedule": "zero-bubble",
        "global_batch_size": 4,
    }
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.estimate("llama-7b", recompute=recompute, **setup)

"""DeepSpeed 0.19.8 itself over slices of a GPT of Megatron's tensor-parallel layers, against `--engine deepspeed --tp --pp`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from megatron_deepspeed_oracle import Ranked, Sent, pipeline_step, tensor_parallel_step

import memcalc
from memcalc.families.base.architecture import Architecture, architecture_of
from memcalc.megatron.layout import padded_vocab

LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "head_dim": 16}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 501,
        "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
SIZES = {"bfloat16": ("bf16", 2), "float16": ("fp16", 2), "float32": ("fp32", 4), "float64": ("fp64", 8),
         "uint8": ("uint8", 1), "int64": ("int64", 8)}  # fmt: skip
PRECISIONS = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}
Totals = dict[tuple[str, str, int], tuple[int, int]]
"""(collective, dtype, ranks of the group) -> calls and bytes."""


def architecture(config: dict[str, Any]) -> Architecture:
    model = memcalc.load_model(config)
    return architecture_of(model.model_type, model.program.config)


def real(config: dict[str, Any], tp: int, dp: int, **how: Any) -> Ranked:
    a = architecture(config)
    return tensor_parallel_step(a, tp=tp, dp=dp, vocab=padded_vocab(a.vocab, tp), **how)


def ours(config: dict[str, Any], tp: int, dp: int, pp: int = 1, **how: Any) -> memcalc.Report:
    batch, micro_batches = how.pop("batch", 1), how.pop("micro_batches", 1)
    return memcalc.estimate(
        config, engine="deepspeed", tp=tp, pp=pp, gpus=tp * dp * pp, micro_batch_size=batch, seq_len=how.pop("seq", 16),
        global_batch_size=dp * batch * micro_batches, precision=PRECISIONS[how.pop("precision", "bf16")], **how,
    )  # fmt: skip


def totals(calls: Sent) -> Totals:
    counts: Counter[tuple[str, str, int]] = Counter()
    payload: Counter[tuple[str, str, int]] = Counter()
    for (collective, name, ranks, elements), n in calls.items():
        dtype, itemsize = SIZES[name]
        counts[collective, dtype, ranks] += n
        payload[collective, dtype, ranks] += n * elements * itemsize
    return {key: (counts[key], payload[key]) for key in counts}


def estimated(report: memcalc.Report) -> Totals:
    out: Totals = {}
    for c in report.collectives:
        calls, payload = out.get((c.collective, c.dtype, c.group_size), (0, 0))
        out[c.collective, c.dtype, c.group_size] = calls + c.calls, payload + c.payload
    return out


# --- a slice, without stages


BUCKET = {"reduce_bucket_size": 100_000}
"""Not so much that it takes time to fill."""
SOME_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 200_000, "max_reuse_distance": 150_000,
             "prefetch_bucket_size": 50_000}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "zero", "how"),
    [
        (LLAMA, 2, {"precision": "fp16"}),
        (LLAMA, 3, {"batch": 2, "micro_batches": 2}),
        (GPT2, 0, {"batch": 2, "micro_batches": 2}),
        (LLAMA, 0, {"precision": "fp16"}),
        (GPT2, 1, {"precision": "fp16"}),
        (GPT2, 2, {"batch": 2, "micro_batches": 2}),
    ],
)  # fmt: skip
def test_a_step_of_a_slice(config: dict[str, Any], zero: int, how: dict[str, Any]) -> None:
    """Every collective of every group, and the peak of each phase on that data-parallel rank where it is highest.

    In stage 0 the second slice has more in the step than the first: it masks the weights that both have for the norm.
    """
    tp, dp, own = 2, 2, 0 if zero else 1
    others = 1 if zero in (0, 3) else dp  # in these all ranks are alike
    runs = [
        real(config, tp, dp, zero=zero, rank=tp * i + own, steps=3 if zero == 3 else 2, **BUCKET, **how)
        for i in range(others)
    ]
    report = ours(config, tp, dp, zero=zero, **(BUCKET if zero else {}), **how)
    assert estimated(report) == totals(runs[0].calls)
    highest = {phase: max(run.phases[phase] for run in runs) for phase in report.phases}
    assert report.phases == highest


SMALL_STAY = {**SOME_KEPT, "param_persistence_threshold": 1000, "max_live_parameters": 60_000,
              "max_reuse_distance": 50_000, "prefetch_bucket_size": 20_000}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tp", "kept"), [(LLAMA, 4, SOME_KEPT), (GPT2, 2, SMALL_STAY)], ids=["untied", "tied"]
)
def test_stage_3_gathers_a_slice_over_the_ranks_that_have_it(
    config: dict[str, Any], tp: int, kept: dict[str, int]
) -> None:
    """A tied head is the whole model's: its weight is gathered with the model, not where it is used."""
    ranked = real(config, tp, 3, zero=3, **BUCKET, **{f"stage3_{name}": n for name, n in kept.items()})
    report = ours(config, tp, 3, zero=3, **BUCKET, **kept)
    assert estimated(report) == totals(ranked.calls)
    assert report.phases == ranked.phases


# --- stages


TIED_LLAMA = {**LLAMA, "num_hidden_layers": 5, "tie_word_embeddings": True, "vocab_size": 3001}


@pytest.mark.parametrize(
    ("config", "layout", "stages", "how"),
    [
        (GPT2, (2, 2, 2), (0, 1), {"micro_batches": 3}),
        (GPT2, (1, 2, 3), (0, 2), {"micro_batches": 5, "batch": 2}),
        (GPT2, (2, 2, 2), (1,), {"batch": 2}),
        (LLAMA, (2, 2, 3), (1,), {"micro_batches": 8}),
        (TIED_LLAMA, (4, 1, 4), (0, 3), {"micro_batches": 2}),
        (GPT2, (2, 2, 2), (1,), {"micro_batches": 2, "zero": 0}),
        (LLAMA, (1, 1, 2), (0,), {"micro_batches": 2, "recompute": True}),
    ],
    ids=[
        "middle of a step",
        "whole tensors",
        "one micro-batch",
        "a stage between two",
        "uneven stages",
        "zero 0",
        "recomputed",
    ],
)
def test_a_step_of_a_stage(
    config: dict[str, Any], layout: tuple[int, int, int], stages: tuple[int, ...], how: dict[str, Any]
) -> None:
    """PipelineEngine with BF16_Optimizer: every collective and send, and the peak of each phase, to the byte."""
    (tp, dp, pp), a = layout, architecture(config)
    zero, recompute = how.pop("zero", 1), how.pop("recompute", False)
    reports = ours(config, tp, dp, pp, zero=zero, recompute="full" if recompute else "none", **how).each_rank()
    for stage in stages:
        ranked = pipeline_step(
            a, tp=tp, dp=dp, pp=pp, stage=stage, vocab=padded_vocab(a.vocab, tp), zero=zero,
            accumulates_in="fp32" if zero else None, recompute=recompute, **how,
        )  # fmt: skip
        assert between_two(estimated(reports[stage]), pp) == totals(ranked.calls)
        assert reports[stage].phases == ranked.phases


def between_two(sent: Totals, pp: int) -> Totals:
    """A send is from one rank to another; its row names the whole axis."""
    return {(kind, dtype, 2 if kind == "send" and n == pp else n): total for (kind, dtype, n), total in sent.items()}


# --- what is refused


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"pp": 2, "zero": 2}, "--zero 2: DeepSpeed's PipelineEngine (pp 2) refuses ZeRO-2 and ZeRO-3; allowed: 0, 1"),
        ({"pp": 2, "zero": 3}, "--zero 3: DeepSpeed's PipelineEngine (pp 2) refuses ZeRO-2 and ZeRO-3; allowed: 0, 1"),
        ({"pp": 2, "zero": 1, "schedule": "gpipe"}, "--schedule gpipe: DeepSpeed's pipeline has only this schedule"),
        (
            {"pp": 2, "zero": 1, "virtual_stages": 2},
            "--virtual-stages 2: DeepSpeed's pipeline has one stage for each rank",
        ),
        ({"pp": 4, "zero": 1}, "--pp 4: llama has 3 layers; allowed: 1 to 3"),
        ({"tp": 8, "zero": 2}, "--tp 8: llama has 4 key/value heads; allowed: a divisor of 4"),
        (
            {"tp": 2, "cp": 2, "zero": 1},
            "--cp 2: Megatron-DeepSpeed (tp 2) refuses shared sequences with tensor parallelism; allowed: 1, or --tp 1",
        ),
        (
            {"tp": 2, "zero": 1, "sequence_parallel": True},
            "--sequence-parallel on: DeepSpeed does not sum the norms' gradients over tensor-parallel ranks",
        ),
        (
            {"tp": 2, "zero": 1, "attention": "sdpa"},
            "--attention sdpa: Megatron-DeepSpeed's GPTModel uses the flash-attn",
        ),
        ({"tp": 2, "zero": 1, "precision": "fp32"}, "--precision fp32: with engine deepspeed and tp or pp above 1"),
        ({"pp": 2, "zero": 1, "precision": "fp16-mixed"}, "--precision fp16-mixed: with engine deepspeed and pp 2"),
        ({"pp": 2, "zero": 1, "grad_dtype": "bf16"}, "--grad-dtype bf16: with engine deepspeed, pp 2 and zero 1"),
        ({"pp": 2, "zero": 1, "first_stage_layers": 1}, "--first-stage-layers 1: DeepSpeed balances its stages itself"),
        (
            {"tp": 2, "recompute": "selective"},
            "--recompute selective: recomputes core attention, which Megatron-DeepSpeed skips with",
        ),
        ({"pp": 2, "zero": 1, "reduce_bucket_size": 9}, "--reduce-bucket-size 9: BF16_Optimizer, which a pipeline"),
        ({"tp": 3, "zero": 1, "gpus": 8}, "--gpus 8: is not divisible by tp 3; allowed: a multiple of 3"),
        ({"tp": 2, "pp": 2, "gpus": 6}, "--gpus 6: is not divisible by tp 2·pp 2 = 4; allowed: a multiple of 4"),
    ],
)
def test_refusals(options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(LLAMA, engine="deepspeed", **{"gpus": 16, **options})
    assert str(error.value).startswith(line)


def test_a_model_that_megatron_deepspeed_has_not_is_refused() -> None:
    with pytest.raises(memcalc.InputError, match="a qwen3 is not modelled by this version; allowed: 1"):
        memcalc.estimate("qwen3-8b", engine="deepspeed", tp=2, gpus=4, zero=1)


# --- sizes


def test_a_published_layout() -> None:
    """BLOOM's: tp 4, pp 12, dp 8. Each rank has 1/48 of the layers, and 1/8 of that part's states."""
    bloom = {**GPT2, "n_embd": 14336, "n_head": 112, "n_layer": 70, "n_positions": 2048, "vocab_size": 250_000}
    report = memcalc.estimate(
        bloom, engine="deepspeed", tp=4, pp=12, gpus=384, zero=1, global_batch_size=2048, seq_len=2048
    )
    assert report.setup.dp == 8
    ranks = report.each_rank()
    assert [rank.rank.layers for rank in ranks] == [6] * 10 + [5] * 2
    assert [rank.in_flight for rank in ranks] == list(range(12, 0, -1))
    for rank in ranks:
        parameters = rank.total("parameters") // 2
        states = rank.total("optimizer_states")
        assert 12 * parameters / 8 <= states <= 12 * parameters / 8 + 12 * 2
    assert report.peak == max(rank.peak for rank in ranks)
    document = report.to_dict()
    assert document["memory"]["peak"] == sum(document["memory"]["at_peak"].values())


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"tp": 2, "gpus": 16, "zero": 1}, (8, 8, 6)),
        ({"tp": 2, "gpus": 16, "zero": 3}, (1, 1, 6)),
        ({"tp": 2, "pp": 2, "gpus": 32, "zero": 1}, (4, 8 + 4, 3)),
        ({"pp": 4, "gpus": 8, "zero": 0}, (4, 4 + 4, 12)),
    ],
)
def test_a_number_of_parameters(options: dict[str, int], sizes: tuple[int, int, int]) -> None:
    """In GB, of 8 billion: a slice's weights, its gradients with those of a micro-batch, and its part of the states."""
    report = memcalc.estimate(params="8B", engine="deepspeed", **options)
    assert tuple(report.total(c) // 10**9 for c in ("parameters", "gradients", "optimizer_states")) == sizes

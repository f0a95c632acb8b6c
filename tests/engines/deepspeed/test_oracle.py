"""DeepSpeed 0.19.8 itself against the engine `deepspeed`: every collective, and the peak of every phase to the byte."""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

import pytest
from auto_ep_cases import CONFIGS
from cases import DROPOUTS, Case, model_types, step_cases
from deepspeed_oracle import OPTIONS, PRECISIONS, Ranked, deepspeed_step, sent
from paper import program_of
from steps_compared import flops_of
from validated import validate

import memcalc
from memcalc.core.dtypes import bf16
from memcalc.core.noted import Begins
from memcalc.engines.deepspeed.notes import NoteModules
from memcalc.tape.profile import Choices, trace

LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "head_dim": 16}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True, "hidden_size": 96, "head_dim": 12, "vocab_size": 3001}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 501,
        "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip

PHASES = ("forward", "backward", "step")

NOTHING_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
SOME_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 200_000, "max_reuse_distance": 150_000,
             "prefetch_bucket_size": 50_000}  # fmt: skip
SMALL_BUCKET = {"reduce_bucket_size": 100_000}
SMALL_STAY = {"param_persistence_threshold": 1000, "max_live_parameters": 400_000, "max_reuse_distance": 150_000,
              "prefetch_bucket_size": 20_000, "reduce_bucket_size": 40_000, "sub_group_size": 50_000}  # fmt: skip


def real(config: dict[str, Any], options: dict[str, int], **how: Any) -> Ranked:
    """A steady step of DeepSpeed."""
    steps = 3 if how["zero"] == 3 else 2
    return deepspeed_step(config, steps=steps, **{OPTIONS[name]: n for name, n in options.items()}, **how)


def ours(config: dict[str, Any], options: dict[str, int], **how: Any) -> memcalc.Report:
    """The estimate of the same setup."""
    gpus, batch = how["gpus"], how.get("micro_batch_size", 1)
    return memcalc.estimate(
        config,
        engine="deepspeed",
        gpus=gpus,
        zero=how["zero"],
        precision=PRECISIONS[how.get("precision", "bf16")],
        micro_batch_size=batch,
        global_batch_size=gpus * batch * how.get("micro_batches", 1),
        seq_len=how.get("seq_len", 16),
        recompute="full" if how.get("recompute") else "none",
        **options,
    )


def estimated(report: memcalc.Report) -> dict[tuple[str, str], tuple[int, int]]:
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for c in report.collectives:
        calls, payload = out.get((c.collective, c.dtype), (0, 0))
        out[c.collective, c.dtype] = calls + c.calls, payload + c.payload
    return out


def without_dropout(case: Case) -> dict[str, Any]:
    """The fields of a case whose dropouts are off, as they are in the oracle."""
    names = {field.name for field in fields_of(program_of(case.fields).config)}
    return case.fields | {name: 0.0 for name in DROPOUTS if name in names}


def check(
    config: dict[str, Any], options: dict[str, int] | None = None, ranks: tuple[int, ...] = (0,), **how: Any
) -> None:
    """Collectives of one rank; the peak of each phase on that one of `ranks` where it is highest."""
    runs = [real(config, options or {}, rank=rank, **how) for rank in ranks]
    report = ours(config, options or {}, **how)
    if how["gpus"] > 1:  # alone, it sends to itself, which is not counted
        assert estimated(report) == sent(runs[0])
        assert runs[0].group_sizes == {c.group_size for c in report.collectives} == {how["gpus"]}
    highest = {phase: max(getattr(run, phase) for run in runs) for phase in PHASES}
    assert report.phases == highest
    assert all(flops_of(report) == run.flops for run in runs)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("gpus", [2, 64])
def test_stage_0(precision: str, gpus: int) -> None:
    check(LLAMA, gpus=gpus, zero=0, precision=precision)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stages_0_to_2_of_a_tied_model(zero: int) -> None:
    check(TIED, ranks=(0, 1), gpus=2, zero=zero)


@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_are_accumulated(zero: int) -> None:
    check(GPT2, ranks=(0, 1), gpus=2, zero=zero, micro_batches=3, micro_batch_size=2)


@pytest.mark.parametrize("zero", [1, 2])
def test_each_ranks_partition(zero: int) -> None:
    """Whole gradients of what straddles a partition's edge: not the same on all ranks."""
    check(LLAMA, ranks=(0, 1, 2), gpus=3, zero=zero, precision="fp16" if zero == 2 else "bf16")


@pytest.mark.parametrize("size", [100_000, 10_000])
def test_buckets_of_stage_1(size: int) -> None:
    """Gradients larger than the bucket stay where they are, and go in one call for each stretch that exceeds it."""
    check(LLAMA, {"reduce_bucket_size": size}, ranks=(0, 1), gpus=2, zero=1)


@pytest.mark.parametrize(("config", "size"), [(LLAMA, 100_000), (TIED, 10_000)], ids=["llama", "tied"])
def test_buckets_of_stage_2(config: dict[str, Any], size: int) -> None:
    """Gradients larger than the bucket, and earlier micro-batches' on both ranks."""
    how = {"gpus": 2, "zero": 2, "micro_batches": 2, "precision": "fp32"}
    check(config, {"reduce_bucket_size": size}, ranks=(0, 1), **how)


@pytest.mark.parametrize(
    ("config", "gpus", "size", "how"),
    [
        (LLAMA, 4, 100_000, {"recompute": True}),
        (LLAMA, 5, 50_000, {"micro_batches": 2}),
        (GPT2, 6, 20_000, {"precision": "fp16", "micro_batch_size": 4}),
        (TIED, 3, 300_000, {"recompute": True, "seq_len": 48}),
    ],
    ids=["llama", "accumulated", "gpt2", "tied"],
)
def test_any_rank_can_be_the_worst_of_stage_2(
    config: dict[str, Any], gpus: int, size: int, how: dict[str, Any]
) -> None:
    """Who has more gradients of its own may have them later: neither the first in backward nor the one with most."""
    check(config, {"reduce_bucket_size": size}, ranks=tuple(range(gpus)), gpus=gpus, zero=2, **how)


@pytest.mark.parametrize(("model_type", "zero"), [("gemma", 0), ("gemma", 2), ("falcon_h1", 0), ("falcon_h1", 3)])
def test_buffers_stay_in_fp32(model_type: str, zero: int) -> None:
    """engine.py, _cast_module_mixed_precision: forward casts the scale of gemma's embedding, and computes falcon_h1's
    projections in fp32."""
    case = step_cases(model_type)[-1]
    options, ranks = {"reduce_bucket_size": 1000} if zero else {}, (0, 1) if zero == 2 else (0,)
    check(case.fields, options, ranks, gpus=2, zero=zero, seq_len=case.seq, micro_batch_size=case.batch)


@pytest.mark.parametrize(
    ("model_type", "zero", "micro_batches", "precision"),
    [
        ("bart", 0, 1, "bf16"), ("roc_bert", 0, 2, "fp32"), ("roc_bert", 1, 1, "fp32"), ("bart", 2, 2, "bf16"),
        ("roc_bert", 2, 2, "bf16"), ("roc_bert", 3, 1, "bf16"),
    ],
)  # fmt: skip
def test_what_gets_no_gradient_is_given_zeros(model_type: str, zero: int, micro_batches: int, precision: str) -> None:
    """Tables and biases that the step does not reach. They are not reduced in stages 1 to 3."""
    case = step_cases(model_type)[1]
    how = {"gpus": 2, "zero": zero, "micro_batches": micro_batches, "precision": precision, "seq_len": case.seq}
    check(
        without_dropout(case), {"reduce_bucket_size": 2000} if zero else {}, (0, 1) if zero in (1, 2) else (0,), **how
    )


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_wants_no_gradient_is_in_no_optimizer(zero: int) -> None:
    """The biases that balance AFMoE's experts."""
    case = step_cases("afmoe")[0]
    ranks = (0, 1) if zero == 1 else (0,)
    check(case.fields, {"reduce_bucket_size": 2000} if zero else {}, ranks, gpus=2, zero=zero, seq_len=case.seq)


def test_a_buffer_that_forward_casts() -> None:
    """ctrl's table of positions follows its embedding."""
    case = step_cases("ctrl")[0]
    check(without_dropout(case), gpus=2, zero=0, seq_len=case.seq)


def test_the_loss_is_scaled_in_its_own_dtype() -> None:
    fields = step_cases("deberta-v2")[0].fields
    rows = validate(fields, engine="deepspeed", gpus=2, zero=0, precision="bf16-mixed", seq_len=16).memory
    assert [row.name for row in rows if row.difference] == []


def test_the_loss_comes_before_the_bucket() -> None:
    """A large vocabulary: when its loss is differentiated no gradient is there yet, and no bucket."""
    wide = {**GPT2, "vocab_size": 20_011}
    for zero in (1, 2):
        check(wide, {"reduce_bucket_size": 1000}, gpus=1, zero=zero, seq_len=60, micro_batch_size=8)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_clipping_sends_nothing_more(zero: int) -> None:
    how = {"gpus": 2, "zero": zero}
    assert estimated(ours(GPT2, {}, **how)) == sent(real(GPT2, {}, clipping=1.0, **how))


@pytest.mark.parametrize(
    ("config", "gpus", "options"),
    [(LLAMA, 4, {}), (LLAMA, 3, NOTHING_KEPT), (LLAMA, 64, SOME_KEPT), (TIED, 8, SOME_KEPT), (GPT2, 2, SOME_KEPT)],
    ids=["default", "nothing kept", "64 ranks", "tied", "gpt2"],
)
def test_stage_3(config: dict[str, Any], gpus: int, options: dict[str, int]) -> None:
    check(config, options, gpus=gpus, zero=3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_stage_3_with_small_parameters_whole_and_several_buckets_and_groups(precision: str) -> None:
    check({**LLAMA, "num_hidden_layers": 2}, SMALL_STAY, gpus=4, zero=3, precision=precision, micro_batches=2)


def test_stage_3_recomputes() -> None:
    check(LLAMA, SOME_KEPT, gpus=4, zero=3, recompute=True, seq_len=8, micro_batch_size=2)


def test_what_is_recomputed_keeps_what_was_gathered_for_it() -> None:
    """The graph has aliases of the weights, which releasing a parameter does not free: in backward they are there twice."""
    check(LLAMA, {**NOTHING_KEPT, "prefetch_bucket_size": 0, **SMALL_BUCKET}, gpus=2, zero=3, recompute=True)


def test_stage_3_has_its_own_linear_function() -> None:
    """It saves biases too, and a recomputation that ends with it has made its output."""
    config = {**LLAMA, "attention_bias": True, "mlp_bias": True}
    check(config, {**NOTHING_KEPT, "reduce_bucket_size": 1000}, gpus=2, zero=3, recompute=True, precision="fp32")


@pytest.mark.parametrize(("model_type", "number"), [("falcon", 0), ("phimoe", 1), ("bert", 0), ("electra", 1)])
def test_stage_3_gathers_what_is_no_plain_linear_layer(model_type: str, number: int) -> None:
    """Falcon's own linear layer; heads with a bias, tied or not."""
    case = step_cases(model_type)[number]
    check(without_dropout(case), {**NOTHING_KEPT, "reduce_bucket_size": 1000}, gpus=2, zero=3)


CASES = [case for model_type in model_types() for case in step_cases(model_type)]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_stage_3_gathers_every_weight_that_is_used(case: Case) -> None:
    """Each belongs to a module that runs, or is read by one."""
    program = program_of(case.fields)
    choices = Choices(bf16, program.attention_kinds[0], False, False, hooks=NoteModules())
    noted = trace(program, choices, case.batch, case.seq, program.layers).noted
    assert noted is not None
    begun = (event.visited for event in noted.events if isinstance(event, Begins))
    gathered = frozenset[int]().union(*(visited.parameters for visited in begun))
    weights = enumerate(program.weights())
    assert [w.name for i, w in weights if i not in gathered and w.name not in program.untrained] == []


def test_stage_3_alone() -> None:
    """One rank gathers nothing."""
    check(LLAMA, SOME_KEPT, gpus=1, zero=3)


def test_gathered_experts_stay_until_their_backward() -> None:
    """The graph has saved views of them, which releasing a parameter does not free."""
    config = {"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"]}
    check(config, {**NOTHING_KEPT, "reduce_bucket_size": 60_000}, gpus=4, zero=3)

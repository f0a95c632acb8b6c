"""DeepSpeed 0.19.8 over transformers' models whose sequences ranks share (Ulysses), against `--engine deepspeed --cp`: peaks
of all phases and saved activations to the byte, and every collective."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from cases import step_cases
from deepspeed_oracle import OPTIONS, PRECISIONS, SIZES, Ranked, deepspeed_step, sent
from steps_compared import flops_of

import memcalc
from memcalc.engines.deepspeed.masked_norm import kept_ranges
from memcalc.families import supporting

SHARES = supporting(lambda s: s.ulysses)
WANTS_HEAD_DIM = supporting(lambda s: s.ulysses_wants_head_dim)

PHASES = ("forward", "backward", "step")
LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "head_dim": 16}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True, "hidden_size": 96, "head_dim": 12, "vocab_size": 3001}
SOME_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 200_000, "max_reuse_distance": 150_000,
             "prefetch_bucket_size": 50_000}  # fmt: skip
BUCKET = {"reduce_bucket_size": 400_000}
"""Not so much that it takes time to fill."""
WIDE = {**LLAMA, "hidden_size": 32, "head_dim": 64, "intermediate_size": 32, "vocab_size": 16}
"""Most of its activations are attention's."""
TWO_KEYS = {**WIDE, "num_key_value_heads": 2, "num_hidden_layers": 2}
MIXTRAL = {"model_type": "mixtral", "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 12,
           "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 211, "num_local_experts": 4}  # fmt: skip
MISTRAL = {**WIDE, "model_type": "mistral", "sliding_window": 64}
QWEN2_MOE = {"model_type": "qwen2_moe", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "num_experts": 4,
             "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}  # fmt: skip
"""Without windows, for which it makes a mask all the same."""
PHI = {"model_type": "phi", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
       "vocab_size": 301, "partial_rotary_factor": 0.5}  # fmt: skip


def ours(config: dict[str, Any], **how: Any) -> memcalc.Report:
    gpus, cp, batch = how["gpus"], how["cp"], how.get("micro_batch_size", 1)
    options = {name: n for name, n in how.items() if name in OPTIONS}
    return memcalc.estimate(
        config,
        engine="deepspeed",
        gpus=gpus,
        cp=cp,
        zero=how["zero"],
        precision=PRECISIONS[how.get("precision", "bf16")],
        micro_batch_size=batch,
        global_batch_size=gpus // cp * batch * how.get("micro_batches", 1),
        seq_len=how.get("seq_len", 16),
        recompute=how.get("recompute", "none"),
        **options,
    )


def real(config: dict[str, Any], rank: int, **how: Any) -> Ranked:
    named = {OPTIONS.get(name, name): value for name, value in how.items()}
    return deepspeed_step(config, rank=rank, steps=3 if how["zero"] == 3 else 2, **named)


def exchanged(ranked: Ranked) -> Counter[tuple[str, str, str, int]]:
    """(phase, collective, dtype, bytes of a call) -> calls, among the ranks of a sequence."""
    out: Counter[tuple[str, str, str, int]] = Counter()
    for (phase, kind, name, elements), calls in ranked.exchanged.items():
        dtype, itemsize = SIZES[name]
        out[phase, kind, dtype, elements * itemsize] += calls
    return out


def over_sequence(report: memcalc.Report) -> Counter[tuple[str, str, str, int]]:
    out: Counter[tuple[str, str, str, int]] = Counter()
    for c in report.collectives:
        if c.axis == "cp":
            assert c.group_size == report.setup.cp
            out[c.phase, c.collective, c.dtype, c.payload // c.calls] += c.calls
    return out


def over_all(report: memcalc.Report) -> dict[tuple[str, str], tuple[int, int]]:
    """(collective, dtype) -> calls and bytes of the full tensors, among all ranks."""
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for c in report.collectives:
        if c.axis == "dp":
            assert c.group_size == report.setup.gpus
            calls, payload = out.get((c.collective, c.dtype), (0, 0))
            out[c.collective, c.dtype] = calls + c.calls, payload + c.payload
    return out


def check(config: dict[str, Any], ranks: tuple[int, ...] = (1,), **how: Any) -> memcalc.Report:
    """Collectives of one rank; the peak of each phase on that one of `ranks` where it is highest.

    The second rank of a sequence has more in stage 0's step than the first.
    """
    runs = [real(config, rank, **how) for rank in ranks]
    report = ours(config, **how)
    assert over_sequence(report) == exchanged(runs[0])
    assert over_all(report) == sent(runs[0])
    assert runs[0].group_sizes == {how["gpus"]}
    assert report.phases == {phase: max(getattr(run, phase) for run in runs) for phase in PHASES}
    assert all(flops_of(report) == run.flops for run in runs)
    if how["zero"] == 0 and how.get("micro_batches", 1) == 1:
        assert report.total("saved_activations") == runs[0].forward_end - runs[0].resident
    return report


@pytest.mark.parametrize(("cp", "batch"), [(2, 2), (4, 1), (8, 1), (8, 2)])
def test_attention_is_the_peak(cp: int, batch: int) -> None:
    """Four heads of keys: two of a rank, one, and each sent to two ranks."""
    report = check(WIDE, gpus=cp, cp=cp, zero=0, micro_batch_size=batch, seq_len=512)
    assert any(name.endswith("received") for name in (row.name for row in report.rows_at("forward")))


def test_fewer_keys_than_ranks_with_more_than_one_query_head_each() -> None:
    check(TWO_KEYS, gpus=4, cp=4, zero=0, micro_batch_size=2, seq_len=512)


@pytest.mark.parametrize(("zero", "precision", "gpus"), [(1, "bf16", 4), (2, "bf16", 2), (2, "fp32", 2)])
def test_stages_1_and_2_reduce_in_fp32(zero: int, precision: str, gpus: int) -> None:
    ranks = tuple(range(gpus))[:3]
    check(LLAMA, ranks=ranks, gpus=gpus, cp=2, zero=zero, precision=precision, micro_batch_size=2, **BUCKET)


@pytest.mark.parametrize(("zero", "size"), [(1, 100_000), (1, 10_000), (2, 100_000)])
def test_buckets(zero: int, size: int) -> None:
    how = {"gpus": 2, "cp": 2, "zero": zero, "micro_batches": 2, "reduce_bucket_size": size}
    check(LLAMA, ranks=(0, 1), **how)


def test_the_worst_rank_of_stage_2_is_none_of_the_first() -> None:
    """The third rank's gradients come later than the first one's, and it has more of them."""
    how = {"gpus": 4, "cp": 2, "zero": 2, "recompute": "full", "reduce_bucket_size": 100_000}
    check(LLAMA, ranks=(0, 1, 2, 3), **how)


@pytest.mark.parametrize(("gpus", "size"), [(2, 400_000), (4, 400_000), (4, 20_000)])
def test_stage_3_reduces_in_fp32(gpus: int, size: int) -> None:
    """The bucket is of that dtype; a gradient that it has no room for is cast."""
    report = check(TIED, ranks=(0,), gpus=gpus, cp=2, zero=3, seq_len=32, **SOME_KEPT, reduce_bucket_size=size)
    assert [i.nbytes for i in report.items if i.name == "reduce bucket"] == [4 * size]
    assert {c.dtype for c in report.collectives if c.collective == "reduce_scatter" and c.axis == "dp"} == {"fp32"}


def test_stage_0_reduces_in_fp32() -> None:
    report = check(LLAMA, gpus=2, cp=2, zero=0)
    assert {c.dtype for c in report.collectives if c.name == "gradients"} == {"fp32"}


@pytest.mark.parametrize("zero", [0, 3])
def test_layers_are_recomputed(zero: int) -> None:
    ranks = (0,) if zero == 3 else (1,)  # a fake group has no answer to what stage 3 asks the first rank
    bucket = BUCKET if zero else {}
    check(WIDE, ranks=ranks, gpus=4, cp=2, zero=zero, recompute="full", seq_len=256, micro_batch_size=2, **bucket)


def test_single_ops_are_recomputed() -> None:
    """Exchanges are sent again: they are not among the ops whose results are kept."""
    check(WIDE, gpus=8, cp=8, zero=0, recompute="op", seq_len=256, micro_batch_size=2)


def test_fp16_and_many_micro_batches() -> None:
    check(PHI, gpus=4, cp=4, zero=0, precision="fp16", micro_batches=3, seq_len=32)


@pytest.mark.parametrize("config", [MIXTRAL, MISTRAL, QWEN2_MOE], ids=["mixtral", "mistral", "qwen2_moe"])
def test_other_families(config: dict[str, Any]) -> None:
    cp = 3 if config is MIXTRAL else 2
    check(config, gpus=cp, cp=cp, zero=0, seq_len=48, micro_batch_size=2, balanced=True)


def test_the_first_rank_of_a_sequence_needs_no_mask() -> None:
    """It counts the weights for stage 0's norm, which the others leave out."""
    how = {"gpus": 2, "cp": 2, "zero": 0, "seq_len": 64}
    ranked, report = real(WIDE, 0, **how), ours(WIDE, **how)
    kept = kept_ranges(memcalc.load_model(WIDE)).nbytes
    assert report.phases["forward"] - ranked.forward == report.phases["backward"] - ranked.backward == kept == 16
    assert report.phases["step"] > ranked.step + kept


# --- what needs no DeepSpeed


def estimate(config: dict[str, Any] = LLAMA, **options: Any) -> memcalc.Report:
    return memcalc.estimate(config, **({"engine": "deepspeed", "gpus": 8, "seq_len": 64} | options))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_degree_of_one_changes_nothing(zero: int) -> None:
    assert estimate(zero=zero, cp=1).to_dict() == estimate(zero=zero).to_dict()


def test_shards_are_over_all_ranks() -> None:
    """As many GPUs, as many shards: what is resident does not know how many of them share a sequence."""
    for component in ("parameters", "gradients", "optimizer_states"):
        totals = {cp: estimate(zero=3, cp=cp).total(component) for cp in (1, 2, 4, 8)}
        assert len(set(totals.values())) == 1


def test_activations_are_shared() -> None:
    """Whatever is saved but single numbers is a rank's part."""
    totals = [cp * estimate(cp=cp, seq_len=1024).total("saved_activations") for cp in (2, 4)]
    assert 0 <= totals[1] - totals[0] < 200


def test_sequences_of_a_step() -> None:
    report = estimate(cp=4, micro_batch_size=3)
    assert (report.setup.dp, report.setup.global_batch_size, report.setup.micro_batches) == (2, 6, 1)
    assert report.setup.cp_comm_type == "a2a"


def test_a_layers_share_and_its_link() -> None:
    """What is exchanged is a layer's, by its name, in named dims, and has a time."""
    report = estimate(cp=4, gpu="h100-80gb", zero=3)
    exchanges = [c for c in report.collectives if c.collective == "all_to_all"]
    assert {c.layer for c in exchanges} == {"model.layers.*"}
    assert {c.name for c in exchanges if c.phase == "forward"} == {"queries", "keys", "values", "attention output"}
    assert {c.each for c in exchanges if "keys" in c.name} == {"seq·batch·kv_heads/cp·head_dim·2 B"}
    assert all(c.calls == 3 for c in exchanges)
    assert all(cost.link == "nvlink" for cost in report.costs)  # type: ignore[union-attr]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cp": 8, "gpus": 8, "seq_len": 60}, "--seq-len 60: is not divisible by cp 8"),
    ({"cp": 16, "gpus": 16}, "--cp 16: does not divide the 8 attention heads"),
    ({"cp": 2, "tp": 2}, "--cp 2: Megatron-DeepSpeed (tp 2) refuses shared sequences with tensor parallelism"),
    (
        {"cp": 2, "pp": 2, "zero": 1},
        "--cp 2: Megatron-DeepSpeed (pp 2) refuses shared sequences with pipeline parallelism",
    ),
    ({"cp": 2, "attention": "eager"}, "--attention eager: "),
    ({"cp": 2, "padded": True}, "--padded on: "),
    ({"cp": 2, "kernels": "fused"}, "--kernels fused: "),
    ({"cp": 2, "cross_entropy": "chunked"}, "--cross-entropy chunked: "),
    ({"cp": 2, "recompute": "selective"}, "--recompute selective: "),
    (
        {"cp": 2, "cp_comm_type": "p2p"},
        "--cp-comm-type p2p: DeepSpeed exchanges heads for tokens (Ulysses); allowed: a2a",
    ),
    ({"cp": 1, "cp_comm_type": "a2a"}, "--cp-comm-type a2a: "),
]


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_what_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as refused:
        estimate(**options)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {**LLAMA, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6},
            "--cp 4: neither divides the 6 key",
        ),
        ({"model_type": "gpt2"}, "--cp 4: with engine deepspeed for a gpt2"),
        ({**MISTRAL, "sliding_window": 64}, "--seq-len 64: DeepSpeed drops the mask of a shared sequence"),
        (
            {**QWEN2_MOE, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
            "--seq-len 64: DeepSpeed drops the mask of a shared sequence",
        ),
        ({"model_type": "mixtral"}, "--cp 4: DeepSpeed reads head_dim"),
        ({"model_type": "gemma2"}, "--attention eager: "),
    ],
    ids=["keys", "family", "window", "windows of some layers", "head_dim", "no sdpa"],
)
def test_models_that_are_refused(config: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as refused:
        estimate(config, cp=4)
    assert str(refused.value).startswith(line)


def test_bare_parameters_are_sharded_over_all_ranks() -> None:
    two, one = (memcalc.estimate(params="1B", engine="deepspeed", gpus=8, zero=3, cp=cp) for cp in (2, 1))
    assert two.peak == one.peak


@pytest.mark.parametrize("model_type", sorted(SHARES))
def test_every_family_that_shares_exchanges_heads(model_type: str) -> None:
    """Of one key/value head as well as of several, and of the sizes that a type has by itself."""
    fields = dict(step_cases(model_type)[-1].fields)
    fields |= {"sliding_window": 4096} if "sliding_window" in fields else {}
    fields |= {"head_dim": 16} if model_type in WANTS_HEAD_DIM and "head_dim" not in fields else {}
    heads = memcalc.load_model(fields).program.heads.size  # type: ignore[attr-defined]
    report = estimate(fields, cp=heads, gpus=heads, seq_len=heads)
    names = {c.name for c in report.collectives if c.collective == "all_to_all" and c.phase == "forward"}
    assert names == {"queries", "keys", "values", "attention output"}

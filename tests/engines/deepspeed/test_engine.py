"""DeepSpeed's rows against what its code does and what its papers and estimators print."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import step_cases
from hypothesis import given
from hypothesis import strategies as st
from oracle import build
from records import on_record

import memcalc
from memcalc.engines import load_engine
from memcalc.engines.deepspeed import zero_layout as deepspeed
from memcalc.engines.deepspeed.sub_groups import sub_groups
from memcalc.estimation.report import Report

CONFIG = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3,
          "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "head_dim": 16}  # fmt: skip


def by_name(report: Report, name: str) -> int:
    (size,) = [i.nbytes or i.at_peak for i in report.items if i.name == name]
    return size


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_flat_weights_are_padded_to_twice_the_ranks(ranks: int) -> None:
    """zero/stage_1_and_2.py: align_dense_tensors(..., nccl_start_alignment_factor · ranks)."""
    model = memcalc.load_model(CONFIG)
    flat = deepspeed.flat_elements(model, ranks)
    assert flat % (2 * ranks) == 0
    assert 0 <= flat - model.num_parameters < 2 * ranks


def test_stage_1_and_2_hold_the_papers_states() -> None:
    model = memcalc.load_model(CONFIG)
    n, ranks = model.num_parameters, 4
    partition = deepspeed.flat_elements(model, ranks) // ranks
    for zero in (1, 2):
        report = memcalc.estimate(model, gpus=ranks, zero=zero, seq_len=64)
        assert report.total("parameters") == 2 * n
        assert report.total("optimizer_states") == 12 * partition
        assert report.total("gradients") == (2 * n if zero == 1 else 2 * partition)


def test_stage_3_pads_every_parameter() -> None:
    model = memcalc.load_model(CONFIG)
    ranks = 3
    sizes = [_product(shape) for _, shape, _ in model.weights()]
    shards = sum(-(-n // ranks) for n in sizes)
    report = memcalc.estimate(model, gpus=ranks, zero=3, seq_len=64)
    assert report.total("parameters") == 2 * shards
    assert report.total("gradients") == 2 * shards
    assert report.total("optimizer_states") == 12 * shards


def _product(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def test_the_reduce_bucket_is_as_large_as_configured_however_small_the_model() -> None:
    """setup_buckets and stage 3's ipg bucket: torch.empty(reduce_bucket_size), 5e8 elements."""
    for zero in (1, 2, 3):
        assert by_name(memcalc.estimate(CONFIG, gpus=2, zero=zero, seq_len=64), "reduce bucket") == 10**9
    fp32 = memcalc.estimate(CONFIG, gpus=2, zero=3, seq_len=64, precision="fp32")
    assert by_name(fp32, "reduce bucket") == 2 * 10**9


def test_a_straddling_parameter_is_held_whole() -> None:
    """copy_grads_in_partition keeps whole gradients: with one huge table over several ranks each of them has it all."""
    config = {**CONFIG, "vocab_size": 100_000}
    model = memcalc.load_model(config)
    table = 100_000 * 128
    assert deepspeed.straddling_elements(model, 8) >= table
    assert deepspeed.straddling_elements(model, 1) == model.num_parameters


def test_default_stages_1_and_2_send_three_units() -> None:
    """Whole buckets are all-reduced (2 units on the wire), then the weights are gathered (1)."""
    model = memcalc.load_model("llama-7b")
    unit = 7 * 2 * model.num_parameters // 8
    for zero, micro_batches, units in ((0, 1, 2), (1, 1, 3), (1, 4, 3), (2, 1, 3), (2, 4, 9)):
        report = memcalc.estimate(model, gpus=8, zero=zero, engine="deepspeed", global_batch_size=8 * micro_batches)
        wire = sum(c.wire for c in report.collectives)
        assert wire == pytest.approx(units * unit, rel=1e-6)  # the scalar reductions and the padding of the flat buffer


def test_stage_3_of_a_large_model_gathers_most_weights_twice() -> None:
    """With the default thresholds what comes soon is prefetched, and of that some is released and gathered once more."""
    report = memcalc.estimate("llama-7b", gpus=8, zero=3)
    payloads = {(c.collective, c.phase): c.payload for c in report.collectives}
    small = payloads["all_gather", "step"]
    whole = 2 * report.model.num_parameters
    assert payloads["reduce_scatter", "backward"] == whole
    assert 0 < payloads["all_gather", "forward"] + small - whole < 0.01 * whole
    kept = payloads["all_gather", "forward"] - payloads["all_gather", "backward"]
    # max_live_parameters is 1e9 elements: about so much is still there when backward begins.
    assert 10**9 <= kept <= 2 * 10**9 + 2 * 2 * 4096 * 32000


def test_stage_3_of_a_small_model_gathers_once() -> None:
    report = memcalc.estimate("gpt2", gpus=8, zero=3)
    assert not [c for c in report.collectives if (c.collective, c.phase) == ("all_gather", "backward")]


def test_textbook_volumes() -> None:
    """arXiv 1910.02054, section 7: stages 1 and 2 send 2Φ, stage 3 sends 3Φ."""
    model = memcalc.load_model("llama-7b")
    for zero, units in ((1, 2), (2, 2), (3, 3)):
        report = memcalc.estimate(model, gpus=8, zero=zero)
        assert sum(c.payload for c in report.textbook) == units * 2 * model.num_parameters


@given(sizes=st.lists(st.integers(1, 10**9), max_size=40))
def test_buckets_hold_every_gradient_once(sizes: list[int]) -> None:
    made = deepspeed.buckets_before_exceeding(sizes, 500_000_000)
    assert [i for bucket in made for i in bucket] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in bucket) <= 500_000_000 or len(bucket) == 1 for bucket in made)
    assert [n for group in sub_groups(sizes, 10**9) for n in group] == sizes


@pytest.mark.parametrize("ranks", [1, 3, 8, 1000])
def test_partitions_hold_every_element_once(ranks: int) -> None:
    model = memcalc.load_model(CONFIG)
    sizes = deepspeed.sizes_of(model)
    parts = [part for (part,) in deepspeed.partitions(model, ranks)]
    assert len(parts) == ranks
    size = deepspeed.flat_elements(model, ranks) // ranks
    assert sum(size - part.padding for part in parts) == sum(sizes)
    assert {i for part in parts for i in range(part.first, part.end)} == set(range(len(sizes)))
    assert all(part.largest <= size and part.whole == sum(sizes[part.first : part.end]) for part in parts)


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5-0.5b", "pythia-160m"])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_deepspeeds_own_estimators(name: str, ranks: int) -> None:
    """estimate_zero2_model_states_mem_needs says 2T + 18T/N, estimate_zero3_model_states_mem_needs 4·largest + 18T/N.

    18 is what is sharded in the step, the fp32 copy of the gradients included: 2 + 12 + 4. In stage 2 the first 2 are the
    gradients; in stage 3 the weights, and the partition of the gradients that stage 3 keeps comes on top.
    """
    model = memcalc.load_model(name)
    total = model.num_parameters
    padding = 18 * len(model.weights())  # each parameter is padded by less than one element a rank
    two = memcalc.estimate(model, gpus=ranks, zero=2, engine="deepspeed")
    states = sum(two.total(c) for c in ("parameters", "gradients", "optimizer_states"))
    cast = 4 * deepspeed.flat_elements(model, ranks) // ranks
    assert states + cast == pytest.approx(2 * total + 18 * total / ranks, abs=padding)
    three = memcalc.estimate(model, gpus=ranks, zero=3, engine="deepspeed")
    states = sum(three.total(c) for c in ("parameters", "optimizer_states"))
    cast = [r.nbytes for r in three.rows_at("step") if r.name == "gradients of a sub-group in fp32"]
    assert states + sum(cast) == pytest.approx(18 * total / ranks, abs=padding)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_earlier_micro_batches_never_lower_a_peak(zero: int, ranks: int) -> None:
    model = memcalc.load_model("llama-7b")
    for recompute in ("none", "full"):
        phases = [
            memcalc.estimate(
                model, gpus=ranks, zero=zero, engine="deepspeed", recompute=recompute, global_batch_size=ranks * m
            ).phases
            for m in (1, 2)
        ]
        assert all(phases[1][phase] >= phases[0][phase] for phase in phases[0])


@pytest.mark.parametrize("ranks", [1, 4])
def test_stage_2_goes_into_the_step_with_the_owned_gradients(ranks: int) -> None:
    """copy_grads_in_partition allocates them at the first flush and they stay until the step."""
    model = memcalc.load_model(CONFIG)
    held = load_engine("deepspeed").holdings(
        model, memcalc.estimate(model, gpus=ranks, zero=2, engine="deepspeed").setup
    )
    owned = [
        row.nbytes for row in held.step if row.component in ("gradients", "buffers") and row.life != "within the step"
    ]
    assert sum(owned) == 2 * deepspeed.straddling_elements(model, ranks)


def test_stage_1_moves_all_gradients_after_backward() -> None:
    """A model of several buckets: while one is reduced, the rest is still there, and the owned ones come on top."""
    model = memcalc.load_model("llama-7b")
    held = load_engine("deepspeed").holdings(model, memcalc.estimate(model, gpus=8, zero=1).setup)
    before, reducing = held.after_backward
    assert sum(row.nbytes for row in before) == 2 * model.num_parameters + 10**9 + 8
    by_name = {row.name: row.nbytes for row in reducing}
    assert 2 * model.num_parameters - by_name["gradients not reduced yet"] <= 10**9
    assert by_name["gradients of the partition"] == 2 * model.num_parameters // 8


def test_the_reduce_bucket_is_as_large_as_it_is_said_to_be() -> None:
    """zero/config.py, reduce_bucket_size: the buffer, its copy, and in how many calls the gradients go."""
    for zero in (1, 2, 3):
        report = memcalc.estimate("llama-7b", gpus=8, zero=zero, reduce_bucket_size=200_000_000)
        assert by_name(report, "reduce bucket") == 400_000_000
        calls = sum(c.calls for c in report.collectives if "gradient buckets" in c.name)
        assert calls == len(deepspeed.buckets_before_exceeding(deepspeed.sizes_of(report.model), 200_000_000)) > 30


def test_thresholds_of_stage_3() -> None:
    """stage3_param_persistence_threshold, stage3_max_live_parameters, stage3_max_reuse_distance, sub_group_size."""
    model = memcalc.load_model("llama-7b")
    sizes = deepspeed.sizes_of(model)

    def report(**options: int) -> Report:
        return memcalc.estimate(model, gpus=8, zero=3, **options)

    nothing_kept = report(param_persistence_threshold=0, max_live_parameters=0, max_reuse_distance=0)
    gathered = {c.phase: c.payload for c in nothing_kept.collectives if c.collective == "all_gather"}
    assert gathered == {"forward": 2 * sum(sizes), "backward": 2 * sum(sizes)}
    most = {row.name: row.nbytes for row in nothing_kept.rows_at("backward") if row.name == "gathered parameters"}
    assert all(nbytes <= 2 * max(sizes) for nbytes in most.values())
    assert by_name(report(param_persistence_threshold=10**9), "small parameters kept whole") == 2 * sum(sizes)

    def step(size: int) -> int:
        return report(sub_group_size=size).phases["step"]

    # one group of all, or the largest that closes at 4·10^7 or more: joined in 16 bits, then cast
    small = max(sum(group) for group in sub_groups([n // 8 for n in sizes], 4 * 10**7))
    assert 4 * 10**7 <= small < 6 * 10**7
    groups = len(sub_groups([n // 8 for n in sizes], 4 * 10**7))
    assert step(10**9) - step(4 * 10**7) == 6 * (sum(sizes) // 8 - small) - 8 * (groups - 1)  # a norm of each


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"reduce_bucket_size": 10**6}, "--reduce-bucket-size 1000000: is an option of DeepSpeed; allowed: with --engine"),
        ({"gpus": 8, "zero": 2, "sub_group_size": 5}, "--sub-group-size 5: is an option of DeepSpeed; .* and --zero 3"),
        ({"gpus": 8, "zero": 3, "reduce_bucket_size": 0}, "--reduce-bucket-size 0: allowed: a whole number from 1"),
    ],
)  # fmt: skip
def test_sizes_that_nothing_has_are_refused(options: dict[str, int], line: str) -> None:
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.estimate("gpt2", **options)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "mamba-130m", "qwen3-30b-a3b"])
def test_hooks_of_stage_3_leave_the_names_of_rows(name: str) -> None:
    """A module whose forward calls its forward again ends twice."""

    def saved(zero: int) -> set[str]:
        report = memcalc.estimate(name, engine="deepspeed", gpus=8, zero=zero, recompute="full", seq_len=64)
        return {i.name for i in report.items if i.component == "saved_activations"}

    assert saved(3) == saved(2)


@on_record
def partition_by_default() -> int:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return DeepSpeedZeroConfig.model_fields["zero_hpz_partition_size"].default


def test_deepspeed_shards_over_all_ranks() -> None:
    """ZeRO-3's hpZ, a second partition of the weights alone, is the one smaller group that DeepSpeed's configuration has."""
    assert partition_by_default() == 1
    options: dict[str, Any] = {"gpus": 16, "engine": "deepspeed", "shard_group": 8}
    line = r"--shard-group 8: .* --zero-hpz-partition-size shares the weights once more \(hpZ\); allowed: 16, or"
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.estimate("gpt2", zero=3, **options)
    with pytest.raises(memcalc.InputError, match="--shard-group 8: DeepSpeed shards over all ranks of dp·cp"):
        memcalc.estimate("gpt2", zero=2, **options)


@pytest.mark.parametrize("model_type", ["minimax", "openai-gpt", "xglm"])
def test_what_multiplies_weights_with_fp32_buffers_is_refused(model_type: str) -> None:
    """DeepSpeed casts weights alone; transformers' own step over such weights raises."""
    case = step_cases(model_type)[0]
    model = build(case.fields, "eager", torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    ids = torch.zeros((1, case.seq), dtype=torch.int64)
    with pytest.raises(RuntimeError, match="dtype"):
        model(input_ids=ids, labels=ids)
    with pytest.raises(
        memcalc.InputError, match=f"--precision bf16-mixed: DeepSpeed casts only weights, and a {model_type}"
    ):
        memcalc.estimate(case.fields, gpus=2, engine="deepspeed", seq_len=case.seq)
    assert memcalc.estimate(case.fields, gpus=2, engine="deepspeed", seq_len=case.seq, precision="fp32").peak

"""What a higher ZeRO stage may need: less of the model's states always, a lower peak where the engine's own buffers are smaller
than what its shards save."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from records import examples

import memcalc
from memcalc.engines.deepspeed.zero_layout import sizes_of, straddling_elements
from memcalc.estimation.report import Report
from memcalc.report.advice import advice

EXAMPLES = settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
STATES = ("parameters", "gradients", "optimizer_states")
NOTHING_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 0, "max_reuse_distance": 0,
                "prefetch_bucket_size": 0}  # fmt: skip


@st.composite
def dense_models(draw: st.DrawFn) -> dict[str, Any]:
    """Every weight a multiple of 64 elements: padding, which on tiny weights is more than what is saved, is left out."""
    kv_heads = draw(st.sampled_from((1, 2, 4)))
    heads = kv_heads * draw(st.sampled_from((1, 2)))
    return {
        "model_type": draw(st.sampled_from(("llama", "qwen2", "mistral"))),
        "hidden_size": 64 * draw(st.integers(1, 6)), "intermediate_size": 64 * draw(st.integers(1, 20)),
        "num_hidden_layers": draw(st.integers(1, 12)), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": 64, "vocab_size": 64 * draw(st.sampled_from((1, 10, 100, 500))),
        "tie_word_embeddings": draw(st.booleans()), "sliding_window": None,
    }  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    gpus, batch = draw(st.sampled_from((2, 4, 8, 64))), draw(st.integers(1, 2))
    return {
        "gpus": gpus, "micro_batch_size": batch, "seq_len": draw(st.sampled_from((2, 8, 64, 256))),
        "global_batch_size": gpus * batch * draw(st.sampled_from((1, 3))),
        "recompute": draw(st.sampled_from(("none", "full"))),
    }  # fmt: skip


ITEMSIZE = {"fp32": 4, "bf16-mixed": 2}
PRECISIONS = st.sampled_from(("fp32", "bf16-mixed"))


def states(report: Report) -> int:
    return sum(report.total(component) for component in STATES)


def stages(config: Any, *zeros: int, **options: Any) -> list[Report]:
    return [memcalc.estimate(config, zero=zero, **options) for zero in zeros]


@pytest.mark.slow
@EXAMPLES
@given(config=dense_models(), workload=workloads(), precision=PRECISIONS)
def test_fsdp2_that_reshards_needs_no_more_but_a_buffer(config: Any, workload: Any, precision: str) -> None:
    """A layer that is gathered again is there twice, in the buffer and copied out: that shows in stacks of a layer or two."""
    model = memcalc.load_model(config)
    kept, reshards = stages(model, 2, 3, engine="fsdp2", precision=precision, **workload)
    for component in ("parameters", "optimizer_states"):  # whole gradients come and go
        assert reshards.total(component) == kept.total(component)
    assert reshards.peak <= kept.peak + (of_a_layer(model) * ITEMSIZE[precision] if model.layers < 3 else 0)


@EXAMPLES
@given(config=dense_models(), workload=workloads(), tp=st.sampled_from((1, 2)))
def test_megatrons_distributed_optimizer_never_needs_more(config: Any, workload: Any, tp: int) -> None:
    assume(config["model_type"] != "qwen2" and config["num_key_value_heads"] % tp == 0)
    workload = {**workload, "gpus": tp * workload["gpus"]}
    whole, sharded = stages(config, 0, 1, engine="megatron", tp=tp, **workload)
    assert states(sharded) < states(whole)
    assert sharded.peak <= whole.peak


def of_a_layer(model: Any) -> int:
    """Elements of its weights."""
    return sum(prod(shape) for name, shape, _ in model.weights() if ".layers.0." in name)


def room(stage: int, bucket: int, sizes: list[int], ranks: int, straddling: int, layer: int) -> tuple[int, int]:
    """Elements that a stage of DeepSpeed's has besides its shards, and what it shards that the stage before does not.

    Both in the gradients' dtype; what is saved is counted low: states are of fp32."""
    total, largest = sum(sizes), max(sizes)
    if stage == 1:  # the bucket and the copy that is sent, while the partition's gradients come
        return 2 * bucket + largest + total // ranks, total - total // ranks
    if (
        stage == 2
    ):  # whole gradients of all that the partition touches, beside those that wait for the bucket to be full
        return straddling + bucket + 2 * largest, total
    return (
        bucket + largest + 2 * layer,
        total - total // ranks,
    )  # it always has its bucket; what a graph has of gathered ones


@pytest.mark.slow
@settings(EXAMPLES, max_examples=examples(60))
@given(
    config=dense_models(), workload=workloads(), precision=PRECISIONS, part=st.sampled_from((64, 1000, 30_000, 10**6))
)
def test_deepspeeds_next_stage_needs_no_more_where_its_buffers_are_smaller(
    config: Any, workload: Any, precision: str, part: int
) -> None:
    model = memcalc.load_model(config)
    ranks, sizes = workload["gpus"], sizes_of(model)
    own = straddling_elements(model, ranks)
    zeros = stages(model, 0, 1, 2, engine="deepspeed", precision=precision, **workload)[:1]
    small = {"engine": "deepspeed", "precision": precision, "reduce_bucket_size": part, **workload}
    zeros += stages(model, 1, 2, **small) + stages(model, 3, **small, **NOTHING_KEPT)
    for stage, (lower, higher) in enumerate(pairwise(zeros), 1):
        assert states(higher) <= states(lower), stage
        needs, saves = room(stage, part, sizes, ranks, own, of_a_layer(model))
        if needs <= saves:
            assert higher.peak <= lower.peak, stage


def test_a_small_model_needs_more_in_stage_3() -> None:
    """DeepSpeed's buffers do not shrink with the model. What is advised then is the stage below."""
    two, three = stages("gpt2", 2, 3, engine="deepspeed", gpus=8)
    assert states(three) < states(two)
    assert three.peak > two.peak
    assert ("--zero 2", three.peak - two.peak, two.peak) in [(one.flags, one.saves, one.peak) for one in advice(three)]
    small = {"reduce_bucket_size": 10**7, **NOTHING_KEPT}
    assert memcalc.estimate("gpt2", engine="deepspeed", gpus=8, zero=3, **small).peak < two.peak
    assert not any(change.flags.startswith("--zero") for change in advice(memcalc.estimate("llama-7b", gpus=8, zero=3)))


def test_a_table_that_most_ranks_touch_needs_more_in_stage_2() -> None:
    """Stage 2 keeps the gradient of a weight on a partition's edge whole, beside the ones that wait for the bucket."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32000,
              "num_attention_heads": 1, "tie_word_embeddings": True}  # fmt: skip
    one, two = stages(config, 1, 2, engine="deepspeed", gpus=8, seq_len=8, reduce_bucket_size=1000)
    assert states(two) < states(one)
    assert two.peak > one.peak

"""ZeRO-Inference against DeepSpeed's own engine: what it gathers, in which order, and the most elements at once."""

from __future__ import annotations

from typing import Any

import pytest
from inference.zero_inference_oracle import gathers

import memcalc
from memcalc.core.dtypes import bf16
from memcalc.engines.deepspeed.zero3_coordinator import Thresholds
from memcalc.inference.zero_inference import DEFAULTS, needs, play, seconds_of_copies
from memcalc.inputs.gpu import load_gpu
from memcalc.offload.host import host_items, totals
from memcalc.timing.kernels import Unknown

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 90,
    "n_positions": 32,
}
CASES = [
    (LLAMA, {"prefetch": 10_000, "persistence": 64}),
    (LLAMA, {"prefetch": 0, "persistence": 64}),
    (LLAMA, {"prefetch": 50_000, "persistence": 5_000}),
    (LLAMA, {"prefetch": 10_000, "persistence": 0, "max_live": 12_000}),
    (LLAMA, {}),
    (LLAMA | {"tie_word_embeddings": True}, {"prefetch": 9_000, "persistence": 64, "max_reuse": 1_000}),
    (LLAMA | {"tie_word_embeddings": True}, {"prefetch": 9_000, "persistence": 64}),
    (GPT2, {"prefetch": 4_000, "persistence": 100}),
]
NAMES = {
    "prefetch": "stage3_prefetch_bucket_size", "persistence": "stage3_param_persistence_threshold",
    "max_live": "stage3_max_live_parameters", "max_reuse": "stage3_max_reuse_distance",
}  # fmt: skip


@pytest.mark.parametrize("fields,given", CASES, ids=lambda one: one.get("model_type") or str(one))
def test_the_gathers_of_a_forward(fields: dict[str, Any], given: dict[str, int]) -> None:
    model = memcalc.load_model(fields)
    names = [name for name, _, _ in model.weights()]
    played = play(model, Thresholds(**{**DEFAULTS._asdict(), **given}))
    theirs, most, copied = gathers(fields, **{NAMES[name]: value for name, value in given.items()})
    assert [sorted(names[i] for i in gather) for gather in played.gathers] == theirs
    assert (played.most, played.copied) == (most, copied)


def test_the_bytes_of_a_large_model() -> None:
    model = memcalc.load_model("llama-2-70b")
    found = needs(model, bf16, "cpu")
    kept = sum(2 * 8192 for _ in range(80)) + 8192
    assert found.per_forward == 2 * (model.num_parameters - kept)
    assert found.gpu < 2 * model.num_parameters / 10
    assert sum(row.nbytes for row in found.host) == 2 * model.num_parameters
    assert totals(host_items(found.host))["pinned"] >= 2 * model.num_parameters


def test_ranks_share_the_copies_and_have_a_buffer() -> None:
    model = memcalc.load_model("llama-7b")
    one, four = needs(model, bf16, "cpu"), needs(model, bf16, "cpu", ranks=4)
    assert four.per_forward == one.per_forward // 4
    assert four.gpu > one.gpu


def test_nvme_has_buffers_on_the_host() -> None:
    found = totals(host_items(needs(memcalc.load_model("llama-7b"), bf16, "nvme").host))
    assert found["nvme"] == 2 * memcalc.load_model("llama-7b").num_parameters
    assert found["pinned"] >= 5 * 10**8 * 2


def test_the_time_of_the_copies() -> None:
    gpu = load_gpu("a100-80gb")
    seconds = seconds_of_copies(140 * 10**9, gpu)
    assert not isinstance(seconds, Unknown)
    assert seconds == pytest.approx(140 / (0.7 * 32))
    assert isinstance(seconds_of_copies(1, gpu._replace(links={})), Unknown)


def test_an_unknown_place() -> None:
    with pytest.raises(memcalc.InputError, match="--zero-inference disk"):
        needs(memcalc.load_model(LLAMA), bf16, "disk")

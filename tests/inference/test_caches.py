"""What caches hold at the end of a run, of families whose forward with a cache is not written out, and of static caches."""

from __future__ import annotations

import pytest
from cases import step_cases
from generation_oracle import decoded, generated, statically, without_a_cache_object

import memcalc
from memcalc.inference.layers import cache_layers

HYBRID = (
    "mamba", "falcon_mamba", "mamba2", "jamba", "bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2",
    "lfm2_moe",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "minimax",
)  # fmt: skip
DEFAULT = ("mamba", "jamba", "zamba2", "lfm2", "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=() if one in DEFAULT else pytest.mark.slow) for one in HYBRID]
)
def test_keys_values_and_states(model_type: str) -> None:
    for case in step_cases(model_type)[:2]:
        fields = dict(case.fields)
        attention = memcalc.load_model(fields).program.attention_kinds[0]
        real = generated(fields, 2, 9, 3, attention=attention)
        for new in range(4):
            report = memcalc.infer(fields, batch_size=2, prompt_len=9, new_tokens=new)
            assert report.kv_cache + report.state_cache == real[new].held, (case.name, new)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "number"), [("rwkv", 0), ("recurrent_gemma", 0), ("recurrent_gemma", 2), ("recurrent_gemma", 3)]
)
def test_states_that_no_cache_object_has(model_type: str, number: int) -> None:
    fields = dict(step_cases(model_type)[number].fields)
    real = without_a_cache_object(fields, 2, 9, 3)
    for new in range(4):
        report = memcalc.infer(fields, batch_size=2, prompt_len=9, new_tokens=new)
        assert report.kv_cache + report.state_cache == real[new]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["t5", "bart", "whisper"])
def test_a_decoder_behind_an_encoder(model_type: str, attention: str) -> None:
    for case in step_cases(model_type)[:2]:
        fields = dict(case.fields)
        prompt = 3 if model_type == "whisper" else 11  # whisper's prompt is its decoder's
        real = decoded(fields, 2, prompt, 3, attention=attention)
        for new in range(4):
            report = memcalc.infer(fields, batch_size=2, prompt_len=prompt, new_tokens=new, attention=attention)
            assert report.kv_cache == real[new].held
            assert report.prefill_peak == real[0].peak
            assert report.decode_peak == (max(real[1].peak, real[new].peak) if new else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "deepseek_v3", "mistral", "jamba", "falcon_h1", "llama4_text"]
)
@pytest.mark.parametrize("longest", [8, 15])
def test_static_caches(model_type: str, longest: int) -> None:
    fields = dict(step_cases(model_type)[0].fields)
    report = memcalc.infer(fields, batch_size=2, prompt_len=6, new_tokens=longest - 6, cache="static")
    assert report.kv_cache + report.state_cache == statically(fields, 2, 6, longest)


def test_layers_say_what_they_keep() -> None:
    latent = cache_layers(memcalc.load_model("deepseek-v3").program)
    assert {(one.kind, one.kv_heads, one.k_width, one.v_width) for one in latent} == {("latent", 1, 512, 64)}
    assert len(latent) == 61
    gemma = cache_layers(memcalc.load_model("gemma-3-1b").program)
    assert [one.kind for one in gemma[:6]] == ["sliding"] * 5 + ["full"]
    assert {one.window for one in gemma} == {512, None}
    jamba = cache_layers(memcalc.load_model("jamba-v0.1").program)
    assert [one.kind for one in jamba].count("full") == 4
    assert all(state.dtype is None or state.dtype.name == "fp32" for one in jamba for state in one.states)
    assert {one.kind for one in cache_layers(memcalc.load_model("t5-small").program)} == {"full", "cross"}
    falcon = cache_layers(memcalc.load_model("falcon-40b").program)
    assert {one.kv_heads for one in falcon} == {128}  # transformers repeats the 8 heads before it caches them


@pytest.mark.parametrize(("model_type", "attention"), [("qwen2", "sdpa"), ("gemma2", "eager")])
def test_a_window_of_one(model_type: str, attention: str) -> None:
    """A layer with a window of one keeps all tokens, as `[-1 + 1:]` is all of them, and its mask covers the new token alone."""
    (fields, *_) = (dict(case.fields) for case in step_cases(model_type) if case.fields.get("sliding_window"))
    fields["sliding_window"] = 1
    real = generated(fields, 5, 17, 1, attention=attention)
    report = memcalc.infer(fields, batch_size=5, prompt_len=17, new_tokens=1, attention=attention)
    assert report.kv_cache == real[1].held
    assert (report.prefill_peak, report.decode_peak) == (real[0].peak, real[1].peak)

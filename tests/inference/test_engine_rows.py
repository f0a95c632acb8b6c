"""A serving engine's table and its budget tell of one run; what is missing is all that is missing; groups of a kernel."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.core.dtypes import bf16, fp32
from memcalc.inference.heights import KV, STATE
from memcalc.inference.quantised_methods import method_of
from memcalc.inference.serving.experts_in_mxfp4 import on
from memcalc.inference.serving.without_scores import is_of_pairs
from memcalc.inputs.gpu import load_gpu


def run(model: Any, **given: Any) -> Any:
    return memcalc.infer(model, **{"prompt_len": 512, "new_tokens": 3, "gpu": "h100-80gb", **given})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["gemma-2-9b", "gpt-oss-20b"])
def test_a_table_has_no_scores(name: str, engine: str) -> None:
    """transformers has eager attention alone for these; the engines' kernels write no scores and no masks."""
    found, plain = run(name, engine=engine), run(name)
    for step, whole in zip(
        (found.run.prefill, *found.run.decodes), (plain.run.prefill, *plain.run.decodes), strict=True
    ):
        alive = {event if event >= 0 else ~event for event in step.log}
        gone = [row for i, row in enumerate(step.rows) if i not in alive]
        assert gone and not any(is_of_pairs(step.rows[i]) for i in alive)
        assert all(is_of_pairs(row) and row.component not in (KV, STATE) for row in gone)
        assert [phase for _, phase, _ in step.segments] == [phase for _, phase, _ in whole.segments]
    assert found.total == sum(item.at_peak for item in found.items)
    assert found.kv_cache == plain.kv_cache and found.weights == plain.weights
    assert found.prefill_peak < plain.prefill_peak


def test_the_table_grows_with_the_prompt_as_the_budget_does() -> None:
    short, long = (run("falcon-7b", engine="vllm", prompt_len=n) for n in (1024, 2048))
    assert long.prefill_peak - long.weights == pytest.approx(2 * (short.prefill_peak - short.weights), rel=0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_missing_has_the_sequences_cache(engine: str) -> None:
    """Without room for one block, what is missing is what the budget is over, and the cache of the batch."""
    for batch in (1, 3):
        found = run("llama-13b", engine=engine, gpu="16GiB" if engine == "sglang" else "rtx5080", batch_size=batch)
        serving = found.serving
        assert serving.cache < 0 and found.fits is False
        tokens = -(-515 // serving.block_size) * serving.block_size
        assert serving.bytes_per_sequence == tokens * 40 * 2 * 5120 * 2
        assert found.fit.headroom == serving.cache - batch * serving.bytes_per_sequence


@pytest.mark.parametrize("tokens", [100, 4096])
def test_a_sequence_fits_exactly_in_its_bytes(tokens: int) -> None:
    """SGLang's pools, with a pool of sliding layers and without."""
    from memcalc.inference.serving import sglang, vllm

    for name in ("llama-7b", "gpt-oss-20b"):
        model = memcalc.load_model(name)
        layers = vllm.layers_of(model, "sglang")
        need = sglang.pool(model, layers, 0, bf16).nbytes(tokens)
        assert sglang.pool(model, layers, need + need // 100, bf16).sequences(tokens) == 1
        assert sglang.pool(model, layers, need - need // 50, bf16).sequences(tokens) == 0


@pytest.mark.parametrize(
    ("gpu", "dtype"), [("a100-80gb", None), ("rtx5090", None), ("b200", fp32), ("h100-80gb", fp32), ("mi300x", fp32)]
)
def test_biases_of_experts_by_kernel(gpu: str, dtype: Any) -> None:
    """vllm oracle/mxfp4.py: `.to(torch.float32)` for FlashInfer's TRTLLM, Triton and AITER; Marlin has the model's dtype."""
    method = method_of("mxfp4", bf16, None)
    assert method is not None and on(load_gpu(gpu), method).rule.expert_bias is dtype
    found = run("gpt-oss-20b", engine="vllm", gpu=gpu, quantize="mxfp4")
    biases = {item.dtype for item in found.items if item.component == "weights" and item.name.endswith("proj_bias")}
    assert biases == {"bf16" if dtype is None else "fp32"}


@pytest.mark.parametrize("size", [16, 256, 512, 1024])
def test_groups_that_marlin_does_not_take(size: int) -> None:
    """vLLM refuses them for GPTQ (verify_marlin_supported), and has another kernel for AWQ."""
    with pytest.raises(memcalc.InputError, match=rf"--group-size {size}: .* allowed: -1, 32, 64, 128"):
        run("mistral-7b", engine="vllm", quantize="gptq", group_size=size)
    noted = run("mistral-7b", engine="vllm", quantize="awq", group_size=size)
    assert any(f"groups of {size}: vLLM's Marlin takes" in note for note in noted.notes)
    assert not any("Marlin takes" in note for note in run("mistral-7b", engine="vllm", quantize="awq").notes)
    assert run("mistral-7b", quantize="gptq", group_size=size).weights


def test_a_windows_time_is_noted() -> None:
    asked: dict[str, Any] = {"prompt_len": 6000, "engine": "vllm"}
    assert any("window of 4096" in note for note in run("mistral-7b", **asked).notes)
    assert not any("window of" in note for note in run("mistral-7b", engine="vllm").notes)

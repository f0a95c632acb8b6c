"""`memcalc infer` with quantised weights, serving engines, ZeRO-Inference and times: the parts, then their sums."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
from command import environment

import memcalc
from memcalc.core.dtypes import bf16
from memcalc.inference.quantised_methods import method_of
from memcalc.inference.weights import weight_rows
from memcalc.report.inference_table import print_inferred

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip


def run(model: Any = LLAMA, **given: Any) -> Any:
    return memcalc.infer(model, **{"prompt_len": 100, "new_tokens": 20, **given})


@pytest.mark.parametrize("kind", ["fp8", "int8", "nf4", "fp4", "int4", "gptq", "awq"])
def test_the_weights_of_a_run_are_quantised(kind: str) -> None:
    found = run(quantize=kind)
    rows = weight_rows(memcalc.load_model(LLAMA), bf16, method_of(kind, bf16, None))
    assert found.weights == sum(row.nbytes for row in rows)
    assert sum(item.nbytes for item in found.items if item.component == "weights") == found.weights
    if kind not in ("nf4", "fp4"):
        assert found.total == found.weights + (run().total - run().weights)


def test_four_bits_are_copied_for_a_product_of_several_rows() -> None:
    """Linear4bit dequantises a weight (MatMul4Bit), but for a single row, which gemv_4bit multiplies (bitsandbytes
    autograd/_functions.py, matmul_4bit). The largest copies are those of the MLP."""
    plain, packed = run(prompt_len=10), run(prompt_len=10, quantize="nf4")
    copied = [item for item in packed.items if item.name.endswith("copy of the 4-bit weight")]
    assert packed.prefill_peak - packed.weights > plain.prefill_peak - plain.weights
    assert [item.at_peak for item in copied] == [2 * 512 * 1024]
    assert packed.decode_peak - packed.weights == plain.decode_peak - plain.weights
    two, many = (run(batch_size=8, quantize=kind) for kind in ("none", "nf4"))
    assert many.decode_peak - many.weights > two.decode_peak - two.weights


def test_the_configuration_says_how_weights_are_quantised() -> None:
    said = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert run(LLAMA | {"quantization_config": said}).weights == run(quantize="gptq").weights
    assert run(LLAMA | {"quantization_config": said}, quantize="none").weights == run().weights
    assert not any("16-bit base" in note for note in run(LLAMA | {"quantization_config": said}).notes)


def test_ranks_pack_their_own_parts() -> None:
    whole, half = run(quantize="gptq"), run(quantize="gptq", tp=2)
    sizes = {item.name: item.nbytes for item in half.items}
    for item in whole.items:
        if item.component == "weights" and item.name.endswith("qweight"):
            assert 2 * sizes[item.name] == item.nbytes


def test_vllm_divides_the_gpu() -> None:
    found = run("llama-3-8b", engine="vllm", gpu="a100-80gb", batch_size=3, cuda_graph_memory="1GiB")
    serving = found.serving
    graphs = serving.graphs.known
    assert serving.cache == serving.reserved - serving.weights - serving.activations - serving.outside - graphs
    assert serving.num_blocks == serving.cache // serving.bytes_per_block
    assert serving.blocks_per_sequence == -(-120 // 16)
    assert found.max_sequences == min(256, (serving.num_blocks - 1) // serving.blocks_per_sequence)
    assert found.fits and not run("llama-3-8b", engine="vllm", gpu="a100-80gb", batch_size=300).fits


def test_the_profiling_run_of_published_logs() -> None:
    """github.com/vllm-project/vllm/issues/10517: profiling Llama-3.1-8B with 20,000 and 29,000 tokens took 17.06 and 17.98 GiB,
    of which 14.99 are weights. transformers' forward has one hidden state more at its peak: 7 to 8 % more."""
    from memcalc.inference.serving.served import profile_peak

    found = run("llama-3.1-8b", engine="vllm", gpu="rtx3090")
    for tokens, gib in ((20_000, 17.06 - 14.9888), (29_000, 17.98 - 14.9888)):
        assert 1.0 < profile_peak(found, tokens, 256) / 2**30 / gib < 1.08


def test_sglang_divides_the_gpu() -> None:
    found = run("llama-3-8b", engine="sglang", gpu="h100-80gb", mem_fraction_static=0.5)
    serving = found.serving
    assert serving.share == 0.5 and serving.cache == serving.reserved - serving.weights
    assert serving.tokens == serving.cache // (32 * 8 * 256 * 2)
    assert found.max_sequences == serving.tokens // 120


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["whisper-tiny", "t5-small", "rwkv-4-169m"])
def test_models_that_are_not_served(engine: str, name: str) -> None:
    with pytest.raises(memcalc.InputError, match=f"--engine {engine}"):
        memcalc.infer(name, engine=engine, new_tokens=4)


def test_no_room_is_no_sequence() -> None:
    for engine in ("vllm", "sglang"):
        found = run("llama-2-70b", engine=engine, gpu="rtx4090")
        assert found.max_sequences == 0 and found.fits is False
        assert found.serving.tokens == 0


def test_zero_inference_keeps_the_weights_off_the_gpu() -> None:
    found = run("llama-2-70b", zero_inference="cpu", gpu="a100-80gb")
    assert found.weights < 2 * memcalc.load_model("llama-2-70b").num_parameters / 20
    document = found.to_dict()
    assert document["host"]["pinned"] >= 2 * document["model"]["parameters"]
    seconds = document["host"]["copied_per_forward"] / (0.7 * 32e9)
    assert document["time"]["decode_seconds"] == pytest.approx(seconds)
    assert run("llama-2-70b", zero_inference="nvme", gpu="a100-80gb").to_dict()["time"]["unknown"] is not None


@pytest.mark.parametrize("given,named", [
    ({"engine": "trt"}, "--engine 'trt'"), ({"block_size": 16}, "--block-size 16"), ({"quantize": "int3"}, "--quantize int3"),
    ({"mem_fraction_static": 0.8, "engine": "vllm"}, "--mem-fraction-static 0.8"), ({"group_size": 64}, "--group-size 64"),
    ({"gpu_memory_utilization": 1.2, "engine": "vllm", "gpu": "h200"}, "--gpu-memory-utilization 1.2"),
    ({"gpu_memory_utilization": "x", "engine": "vllm"}, "--gpu-memory-utilization 'x'"),
    ({"double_quant": True}, "--double-quant on"),
    ({"engine": "vllm", "kv_dtype": "int8"}, "--kv-dtype int8"), ({"engine": "vllm", "kv_dtype": "fp32"}, "--kv-dtype fp32"),
    ({"engine": "vllm", "pp": 2}, "--pp 2"), ({"zero_inference": "cpu", "tp": 2}, "--tp 2"),
    ({"zero_inference": "ssd"}, "'ssd'"),
    ({"zero_inference": "cpu", "quantize": "nf4"}, "--quantize nf4"), ({"engine": "vllm", "cache": "static"}, "--cache static"),
    ({"group_size": "x", "quantize": "awq"}, "--group-size 'x'"),
], ids=str)  # fmt: skip
def test_what_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        found = run(**given)
        assert found.fit
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("given", [
    {}, {"engine": "vllm", "gpu": "h100-80gb"}, {"engine": "sglang", "gpu": "h100-80gb"},
    {"zero_inference": "cpu", "gpu": "h100-80gb"},
    {"quantize": "awq", "gpu": "rtx4090"},
], ids=str)  # fmt: skip
def test_the_document_and_the_table_say_the_same(given: dict[str, Any]) -> None:
    found = run(**given)
    document = json.loads(json.dumps(found.to_dict()))
    assert {"serving", "host", "quantization", "time"} <= document.keys()
    assert {"prefill_seconds", "tokens_per_second"} <= document["time"].keys()
    file = io.StringIO()
    print_inferred(found, file=file)
    if document["serving"] is not None:
        assert f"{document['serving']['tokens']:,} tokens" in file.getvalue()
    if document["time"]["prefill_seconds"] is not None:
        items = document["time"]["items"]
        prefill = sum(item["seconds"] for item in items if item["part"] == "prefill")
        assert prefill == pytest.approx(document["time"]["prefill_seconds"])


def test_the_command() -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        called = [sys.executable, "-m", "memcalc", "infer", *arguments]
        return subprocess.run(called, capture_output=True, text=True, env=environment(), check=False)

    table = json.loads(command("llama-7b", "--dtype-table", "--json").stdout)
    assert [line["dtype"] for line in table["dtypes"]] == ["fp32", "fp16", "bf16", "int8", "int4"]
    wrong = command("llama-7b", "--engine", "vllm", "--mem-fraction-static", "0.5")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    full = command("llama-2-70b", "--engine", "vllm", "--gpu", "rtx4090", "--check", "--prompt-len", "64")
    assert full.returncode == 1

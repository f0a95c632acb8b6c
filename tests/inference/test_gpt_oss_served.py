"""gpt-oss in serving engines: experts in MXFP4 padded as vLLM's kernels want them, and a profiling run without scores."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import bf16
from memcalc.inference.quantised_formats import MXFP4
from memcalc.inference.quantised_methods import method_of
from memcalc.inference.serving.experts_in_mxfp4 import OnHopper, Rounded, on
from memcalc.inference.weights import weight_rows
from memcalc.inputs.gpu import load_gpu
from memcalc.units import GIB

EXPERTS, HIDDEN, FFN = Dim("experts", 32), Dim("hidden", 2880), Dim("ffn", 2880)
BOTH = Dim("2·ffn", 5760)


def served(name: str, gpu: str, length: int, share: float, **given: Any) -> Any:
    asked = {"engine": "vllm", "gpu": gpu, "gpu_memory_utilization": share, "quantize": "mxfp4", **given}
    return memcalc.infer(name, prompt_len=length - 1, new_tokens=1, **asked).serving


def shapes(found: Any) -> list[tuple[int, ...]]:
    return [tuple(dim.size for dim in one.shape) for one in found]


def test_marlin_rounds_the_hidden_size_to_256_and_the_intermediate_one_to_128() -> None:
    """`mxfp4_round_up_hidden_size_and_intermediate_size` and `Mxfp4MoEMethod.create_weights` of vLLM 0.33: 2880 becomes 3072 and
    2944, w13 is (experts, 2·2944, 3072/2) with scales (…, 3072/32), w2 (experts, 3072, 2944/2) with (…, 2944/32)."""
    marlin = Rounded(256, 128)
    assert shapes(marlin.stacked(EXPERTS, BOTH, HIDDEN, 2)) == [(32, 5888, 1536), (32, 5888, 96)]
    assert shapes(marlin.stacked(EXPERTS, HIDDEN, FFN, 1)) == [(32, 3072, 1472), (32, 3072, 92)]


def test_a_layout_of_hopper_pads_the_scales() -> None:
    """`swizzle_data` of triton_kernels in vLLM 0.33: codes to (16, 32), which (2880, 1440) are multiples of; scales to 4 along
    the inputs and to 2·8·2·8 = 256 outputs."""
    assert shapes(OnHopper().stacked(EXPERTS, BOTH, HIDDEN, 2)) == [(32, 5760, 1440), (32, 5888, 92)]
    assert shapes(OnHopper().stacked(EXPERTS, HIDDEN, FFN, 1)) == [(32, 2880, 1440), (32, 3072, 92)]


def test_sizes_that_fit_a_tile_are_not_padded() -> None:
    hidden, ffn, both = Dim("hidden", 4096), Dim("ffn", 2048), Dim("2·ffn", 4096)
    for made in (Rounded(256, 128), Rounded(256, 256), OnHopper()):
        assert shapes(made.stacked(EXPERTS, both, hidden, 2)) == shapes(MXFP4().stacked(EXPERTS, both, hidden, 2))
        assert shapes(made.stacked(EXPERTS, hidden, ffn, 1)) == shapes(MXFP4().stacked(EXPERTS, hidden, ffn, 1))


@pytest.mark.parametrize(
    ("gpu", "format"),
    [
        ("a100-80gb", Rounded(256, 128)), ("rtx5090", Rounded(256, 128)), ("b200", Rounded(256, 128)),
        ("h100-80gb", OnHopper()), ("h200", OnHopper()), ("mi300x", Rounded(256, 256)),
    ],
)  # fmt: skip
def test_the_kernel_is_that_of_the_gpu(gpu: str, format: Any) -> None:
    method = method_of("mxfp4", bf16, None)
    assert method is not None and on(load_gpu(gpu), method).format == format


def test_the_weights_of_published_logs() -> None:
    """Marlin's: "Model loading took 65.9651 GiB" for gpt-oss-120b (github.com/vllm-project/vllm/issues/23278), and 13.72 GiB for
    gpt-oss-20b on an A100 (vLLM 0.19.0, myoceane.fr/index.php/ai-vllm-a100-gemma-4). The checkpoints have 60.8 and 12.8 GiB."""
    assert served("gpt-oss-120b", "a100-80gb", 8192, 0.9).weights / GIB == pytest.approx(65.9651, rel=0.002)
    assert served("gpt-oss-20b", "a100-80gb", 8192, 0.9).weights / GIB == pytest.approx(13.72, rel=0.004)


def test_the_cache_of_a_published_log() -> None:
    """The same page: "Available KV cache memory: 36.56 GiB" with 0.65 of an A100 and 131,072 tokens. vLLM has subtracted its
    CUDA graphs, whose bytes are not in the log."""
    found = served("gpt-oss-20b", "a100-80gb", 131_072, 0.65)
    assert 36.56 < found.cache / GIB < 36.56 + 0.5


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-2-9b", "falcon-7b", "bloom-560m"])
def test_a_profiling_run_has_no_scores(name: str) -> None:
    """vLLM's kernels have no tensor of all pairs of tokens, where transformers has eager attention alone. Without one the peak
    grows with the tokens."""
    from memcalc.inference.serving.served import profile_peak

    found = memcalc.infer(name, engine="vllm", gpu="h100-80gb", prompt_len=64, new_tokens=1)
    limit = found.run.program.positions_limit or 8192
    short, long = (profile_peak(found, tokens, 1) for tokens in (limit // 4, limit))
    assert long == pytest.approx(4 * short, rel=0.01)


def test_mxfp4_by_its_option_is_that_of_the_configuration() -> None:
    fields = dict(memcalc.load_model("gpt-oss-20b").fields or {})
    said = {**fields, "quantization_config": {"quant_method": "mxfp4"}}
    by_option, by_config = memcalc.infer("gpt-oss-20b", quantize="mxfp4"), memcalc.infer(said)
    assert by_option.weights == by_config.weights < memcalc.infer("gpt-oss-20b").weights / 3
    rows = weight_rows(memcalc.load_model("gpt-oss-20b"), bf16, method_of("mxfp4", bf16, None))
    assert sum(numel(row.shape)[0] * row.dtype.itemsize * row.copies for row in rows) == by_option.weights
    with pytest.raises(memcalc.InputError, match=r"--quantize mxfp4: .* gpt_oss alone"):
        memcalc.infer("mixtral-8x7b", quantize="mxfp4")


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang"])
def test_a_published_format_is_named(engine: str) -> None:
    for name, option in (("gpt-oss-20b", "mxfp4"), ("deepseek-v3", "fp8")):
        asked: dict[str, Any] = {"prompt_len": 64, "engine": engine}
        note = f"--quantize {option} has them as published"
        assert any(note in one for one in memcalc.infer(name, **asked).to_dict()["notes"])
        assert not any(note in one for one in memcalc.infer(name, **asked, quantize=option).to_dict()["notes"])


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("gpt-oss-20b", {"gpu": "a100-80gb", "quantize": "mxfp4", "dtype": "fp16"}, "--dtype fp16: .* in mxfp4 in bf16"),
        ("gpt-oss-20b", {"gpu": "v100-32gb", "quantize": "mxfp4"}, "--quantize mxfp4: vLLM loads such weights from .* 8.0 up"),
        ("llama-3-8b", {"gpu": "v100-32gb", "quantize": "fp8", "dtype": "fp16"}, "--quantize fp8: vLLM loads .* 7.5"),
    ],
)  # fmt: skip
def test_what_vllm_does_not_load(model: str, options: dict[str, Any], line: str) -> None:
    """`get_min_capability` and `get_supported_act_dtypes` of its quantization configurations."""
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.infer(model, engine="vllm", **options)


def test_what_vllm_loads() -> None:
    assert memcalc.infer("gpt-oss-20b", engine="vllm", gpu="a100-80gb", quantize="mxfp4").serving
    assert memcalc.infer("llama-3-8b", engine="vllm", gpu="t4", quantize="fp8", dtype="fp16").serving

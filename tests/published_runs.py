"""Runs whose allocated memory somebody else has measured and published, and the settings that they were made with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import memcalc
from memcalc.families import FAMILIES
from memcalc.families.base.architecture import Architecture


class PublishedRun(NamedTuple):
    """`allocated` and `reserved` are in GiB, as printed, of the rank with most."""

    name: str
    model: dict[str, Any]
    options: dict[str, Any]
    allocated: float
    source: str
    architecture: Architecture | None = None
    """What Megatron made of its options, where no model of transformers is that."""
    reserved: float | None = None

    def estimate(self) -> memcalc.Report:
        if self.architecture is None:
            return memcalc.estimate(self.model, **self.options)
        architecture, family = self.architecture, FAMILIES[self.model["model_type"]]
        own = replace(family, support=replace(family.support, architecture=lambda _: architecture))
        with patch.dict(FAMILIES.found, {family.model_type: own}):
            return memcalc.estimate(self.model, **self.options)


def _of(name: str, **changes: Any) -> dict[str, Any]:
    import json
    from pathlib import Path

    spec = json.loads((Path(__file__).resolve().parent.parent / "model_specs" / f"{name}.json").read_text())
    return spec.get("config", spec) | changes


_SIMUMAX = "SimuMax's published comparison: Megatron with Transformer Engine on 8 B200"
_B200: dict[str, Any] = {
    "gpus": 8,
    "zero": 1,
    "seq_len": 4096,
    "cross_entropy": "fused",
    "gpu": "b200",
    "cublas_workspace_config": ":4096:2:16:8",  # the default on Blackwell until February 2026 (pytorch pull request 175344)
}

_MEGATRON = "Megatron-LM, tests/functional_tests/test_cases/gpt/gpt3_7b_{}_memory_speed, as recorded by its CI"
_GPT3_7B = Architecture(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=16384, vocab=131073, gated=False, rms_norm=False,
    qkv_bias=True, linear_bias=True, qk_norm=False, positions=8192, tied=False, hidden_dropout=0.1, attention_dropout=0.1,
)  # fmt: skip
_GPT3_7B_SIZES: dict[str, Any] = {
    "model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 16384, "vocab_size": 131073,
}  # fmt: skip
_8_GPUS: dict[str, Any] = {
    "gpus": 8, "zero": 1, "seq_len": 8192, "global_batch_size": 8, "gradient_accumulation_fusion": False,
}  # fmt: skip
_TP4: dict[str, Any] = {**_8_GPUS, "tp": 4, "sequence_parallel": False, "micro_batch_size": 2}
_PP4: dict[str, Any] = {
    **_8_GPUS, "pp": 4, "schedule": "interleaved", "virtual_stages": 8, "micro_batch_size": 1, "pp_rank": 3,
}  # fmt: skip


class MegatronRun(NamedTuple):
    """Bytes that Megatron-LM has logged on the last rank: the peak, and what is there between steps."""

    layout: str
    options: dict[str, Any]
    gpu: str
    peak: int
    between_steps: int

    @property
    def published(self) -> PublishedRun:
        options = {**self.options, "gpu": self.gpu}
        source = _MEGATRON.format(self.layout)
        return PublishedRun(
            f"gpt3_7b, {self.layout}, {self.gpu}", _GPT3_7B_SIZES, options, self.peak / 2**30, source, _GPT3_7B
        )


MEGATRON_RUNS = (
    MegatronRun("tp4_pp1", _TP4, "h100-80gb", 57_143_791_616, 20_663_519_232),
    MegatronRun("tp4_pp1", _TP4, "a100-80gb", 58_188_115_968, 20_634_103_808),
    MegatronRun("tp1_pp4", _PP4, "h100-80gb", 60_518_293_504, 24_540_168_192),
    MegatronRun("tp1_pp4", _PP4, "a100-80gb", 60_489_064_448, 24_510_808_064),
)
"""The test sets CUBLAS_WORKSPACE_CONFIG=:4096:8, so torch's two workspaces are 32 MiB each on an A100 too."""


_CASES = "Megatron-LM, tests/functional_tests/test_cases/gpt/{}, as recorded by its CI"
_GPT3_SMALL = Architecture(
    layers=12, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048, vocab=50257, gated=False, rms_norm=False,
    qkv_bias=True, linear_bias=True, qk_norm=False, positions=1024, tied=True, hidden_dropout=0.1, attention_dropout=0.1,
)  # fmt: skip
_SWIGLU_SMALL = replace(_GPT3_SMALL, gated=True, ffn=1344)  # 4·hidden·2/3, down to a multiple of 64 (arguments.py)
_SMALL_SIZES: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 2048, "vocab_size": 50257, "max_position_embeddings": 1024,
}  # fmt: skip
_UNFUSED: dict[str, Any] = {
    "gpus": 8, "engine": "megatron", "seq_len": 1024, "micro_batch_size": 4, "global_batch_size": 32,
    "gradient_accumulation_fusion": False, "attention": "unfused", "sequence_parallel": False,
}  # fmt: skip


def _small(case: str, peak: int, gpu: str, a: Architecture = _GPT3_SMALL, **options: Any) -> PublishedRun:
    given = {**_UNFUSED, "gpu": gpu, **options}
    name = f"gpt3_345m, {case.removeprefix('gpt3_mcore_te_')}, {gpu}"
    return PublishedRun(name, _SMALL_SIZES, given, peak / 2**30, _CASES.format(case), a)


INTERLEAVED_RUN = _small(
    "gpt3_mcore_te_tp1_pp4_vp1", 4_148_525_568, "h100-80gb", pp=4, schedule="interleaved", virtual_stages=3, pp_rank=3
)
"""With expandable segments, so no block is larger than what was asked for; 759 681 536 B between steps."""
UNFUSED_RUNS = (
    (_small("gpt3_mcore_te_tp2_pp2", 1_900_158_464, "a100-80gb", tp=2, pp=2, pp_rank=1), 487_096_832),
    (
        _small("gpt3_mcore_te_tp4_pp1_dist_optimizer_overlap_grad_reduce", 1_515_628_032, "a100-80gb", tp=4, zero=1),
        269_842_944,
    ),
    (
        _small("gpt3_mcore_te_tp1_pp4_swiglu", 2_684_785_152, "a100-80gb", _SWIGLU_SMALL, pp=4, pp_rank=3),
        717_420_032,
    ),
)
"""With the bytes between steps. CUBLAS_WORKSPACE_CONFIG is :4096:8 here too."""


def _b200(what: str, model: dict[str, Any], allocated: float, reserved: float, **options: Any) -> PublishedRun:
    """Four micro-batches of one sequence each."""
    data_ranks = 8 // (options.get("tp", 1) * options.get("pp", 1) * options.get("cp", 1))
    given = {**_B200, "global_batch_size": 4 * data_ranks, **options}
    if "cp" in options:  # a mask of 131 072 tokens, 16 GiB, is not among what was measured
        given |= {"cp_comm_type": "a2a", "attention_mask_in_dataloader": False}
    axes = [f"{axis} {options[axis]}" for axis in ("tp", "cp", "ep", "pp") if axis in options]
    name = ", ".join([what, *axes, *([f"{options['seq_len']} tokens"] if "seq_len" in options else [])])
    return PublishedRun(name, model, given, allocated, _SIMUMAX, reserved=reserved)


_70B = ("Llama-3-70B, 12 layers", _of("llama-3-70b", num_hidden_layers=12, max_position_embeddings=131072))
_405B = ("Llama-3-405B, 4 layers", _of("llama-3.1-405b", num_hidden_layers=4, num_key_value_heads=16))
"""With the 16 key/value heads of SimuMax's configs/models/llama3-405b.json."""
_V2, _V3 = (  # three routed layers
    (f"DeepSeek-V{i}, 4 layers", _of(f"deepseek-v{i}", num_hidden_layers=4, first_k_dense_replace=1)) for i in (2, 3)
)

SIMUMAX_RUNS = (
    _b200(*_70B, 66.55, 70.88, pp=2),
    _b200(*_70B, 60.68, 62.53, tp=2),
    _b200(*_70B, 39.07, 40.18, tp=4),
    _b200(*_70B, 28.29, 29.12, tp=8),
    _b200(*_405B, 87.08, 92.26, pp=2),
    _b200(*_405B, 81.59, 84.70, tp=2),
    _b200(*_405B, 52.89, 54.65, tp=4),
    _b200(*_405B, 38.57, 39.83, tp=8),
    _b200(*_V2, 45.63, 48.79, ep=8),
    _b200(*_V2, 44.70, 47.05, ep=4, pp=2),
    _b200(*_V3, 104.30, 110.18, ep=8),
    _b200(*_V3, 114.00, 118.61, ep=4, pp=2),
    _b200(*_70B, 68.43, 70.33, tp=2, cp=4, seq_len=32768),
    _b200(*_70B, 104.51, 111.94, cp=8, seq_len=32768),
    _b200(*_70B, 112.67, 121.40, tp=2, cp=4, seq_len=131072),
    _b200(*_70B, 147.99, 159.65, cp=8, seq_len=131072),
    _b200(*_405B, 87.03, 91.15, tp=2, cp=4, seq_len=32768),
    _b200(*_405B, 139.22, 152.14, cp=8, seq_len=32768),
    _b200(*_405B, 118.13, 127.50, tp=2, cp=4, seq_len=131072),
)
"""docs/b200/b200_release_v1.2_summary.json, its rows of four micro-batches; those of 8 and 32 have the same memory."""

PUBLISHED_RUNS = (*SIMUMAX_RUNS, *(run.published for run in MEGATRON_RUNS), INTERLEAVED_RUN)


class ReservedRun(NamedTuple):
    """`reserved` is in GiB, as printed."""

    name: str
    options: dict[str, Any]
    reserved: float
    source: str

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def model(self) -> dict[str, Any]:
        return _of("llama-3.1-8b")

    def estimate(self) -> memcalc.Report:
        return memcalc.estimate(self.model, **self.options)


_TORCHTITAN = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md: H100, FSDP, selective AC, no compile"
_FSDP: dict[str, Any] = {
    "engine": "fsdp2", "zero": 3, "micro_batch_size": 2, "seq_len": 8192, "recompute": "op",
    "gpu": "h200-141gb",  # the H100s were of a kind with 96 GB, which has this one's cuBLAS workspaces
}  # fmt: skip

RESERVED_RUNS = (
    ReservedRun("Llama-3.1-8B, 8 GPUs", {**_FSDP, "gpus": 8}, 82.4, _TORCHTITAN),
    ReservedRun("Llama-3.1-8B, 128 GPUs", {**_FSDP, "gpus": 128}, 67.0, _TORCHTITAN),
)
"""The benchmark names the policy "selective" only; op is what the preset of its model (llama3_8b.toml) says."""

TORCHTITANS_OWN = {"peak": 68.63, "replayed": 82.63}
"""GiB of torchtitan's own model in the first of these runs (tests/torchtitan_oracle.py)."""


class OlderRun(NamedTuple):
    """A run whose code does otherwise than the code that is estimated. All in GiB.

    `replayed` is what the code of its time comes to, written from today's modules and played through the same allocator.
    """

    name: str
    model: str | dict[str, Any]
    options: dict[str, Any]
    quantity: str
    """"allocated", "reserved" or "device"."""
    published: float
    replayed: float
    context: float = 0
    """In `replayed`, of a device: what is not the allocator's."""
    allocated: float | None = None
    """Where that is published too."""

    def __hash__(self) -> int:
        return hash(self.name)

    def estimate(self) -> memcalc.Report:
        return memcalc.estimate(self.model, **self.options)

    @property
    def estimated(self) -> int:
        return getattr(self.estimate(), self.quantity)


_MARCH_2024: dict[str, Any] = {**_FSDP, "gpus": 8, "micro_batch_size": 8, "seq_len": 2048}
MARCH_2024_RUNS = (
    OlderRun("Llama-7B, all recomputed", "llama-7b", {**_MARCH_2024, "recompute": "full"}, "reserved", 31.02, 30.37,
             allocated=22.73),
    OlderRun("Llama-7B, op", "llama-7b", {**_MARCH_2024, "recompute": "op"}, "reserved", 59.41, 62.30, allocated=49.54),
)  # fmt: skip
"""pytorch/torchtitan's pull request 165, in percent of 95.0396 GiB. Its "peak active" is what is allocated, and what is freed
but still waited for."""

_POWERLM: dict[str, Any] = {
    "model_type": "granite", "vocab_size": 49152, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 40,
    "num_attention_heads": 36, "num_key_value_heads": 36, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
}  # fmt: skip
_SFT: dict[str, Any] = {
    "gpus": 1, "seq_len": 4096, "recompute": "full", "clip_grad_norm": True, "precision": "bf16", "gpu": "a100-80gb",
}  # fmt: skip
GRANITE_RUNS = (
    OlderRun("PowerLM-3b, 4 sequences", _POWERLM, {**_SFT, "micro_batch_size": 4}, "device", 46.57, 46.5, 0.416, 32.72),
    OlderRun(
        "PowerLM-3b, 8 sequences", _POWERLM, {**_SFT, "micro_batch_size": 8}, "device", 51.69, 51.54, 0.416, 43.83
    ),
)
"""Of tests/published_measurements.json: transformers 4.45.2 and torch 2.4.1 (fms-acceleration's requirements_granite.txt)."""

_ADAPTED: dict[str, Any] = {
    **_SFT, "lora_rank": 16, "lora_targets": "q_proj,k_proj,v_proj,o_proj", "lora_dropout": 0.1,
}  # fmt: skip
LORA_RUNS = (
    OlderRun(
        "Mistral-7B with LoRA, 4 sequences",
        "mistral-7b",
        {**_ADAPTED, "micro_batch_size": 4},
        "allocated",
        24.87,
        24.89,
    ),
    OlderRun(
        "Mistral-7B with LoRA, 8 sequences",
        "mistral-7b",
        {**_ADAPTED, "micro_batch_size": 8},
        "allocated",
        36.08,
        36.10,
    ),
)
"""fms-acceleration's scripts/benchmarks/refs/a100_80gb.csv (commit 876e2ed): framework none, lora, one GPU, 26 704 571 904 and
38 742 912 512 bytes of torch.cuda.max_memory_allocated. transformers 4.48.1, peft 0.13.2, torch 2.4.1 (requirements.txt)."""

_IN_NF4: dict[str, Any] = {
    **_ADAPTED, "precision": "bf16-autocast", "base_dtype": "bf16", "quantize": "nf4", "double_quant": True,
}  # fmt: skip
QLORA_RUNS = (
    OlderRun(
        "Mistral-7B with QLoRA, 4 sequences",
        "mistral-7b",
        {**_IN_NF4, "micro_batch_size": 4},
        "allocated",
        15.25,
        15.26,
    ),
    OlderRun(
        "Mistral-7B with QLoRA, 8 sequences",
        "mistral-7b",
        {**_IN_NF4, "micro_batch_size": 8},
        "allocated",
        26.46,
        26.48,
    ),
)
"""The same file: framework accelerated-peft-bnb, one GPU, 16 373 838 336 and 28 412 178 944 bytes. bitsandbytes quantises with
double quantisation, `bf16=True`, and the plugin casts nothing to fp32."""

_BERT: dict[str, Any] = {"seq_len": 512, "precision": "fp32", "attention": "eager", "gpu": "v100-16gb"}
_BERT_4: dict[str, Any] = {**_BERT, "micro_batch_size": 1, "global_batch_size": 4}
BERT_RUNS = (
    OlderRun("bert-large, 4 sequences", "bert-large", {**_BERT, "micro_batch_size": 4}, "device", 14.60, 14.59, 1.312),
    OlderRun("bert-large, 4 × 1", "bert-large", _BERT_4, "device", 8.48, 8.35, 1.312),
    OlderRun(
        "bert-large, 4 × 1, recomputed", "bert-large", {**_BERT_4, "recompute": "full"}, "device", 6.62, 6.58, 1.312
    ),
)
"""transformers' "Performance and scalability" of January 2022: transformers 4.15, torch 1.10 and CUDA 11.2 on a V100 of 16 GB,
14 949, 8 681 and 6 775 MiB, of which 1 343 are there with one number on the GPU. A classifier; masked tokens are estimated."""

OLDER_RUNS = (*MARCH_2024_RUNS, *GRANITE_RUNS, *LORA_RUNS, *QLORA_RUNS, *BERT_RUNS)

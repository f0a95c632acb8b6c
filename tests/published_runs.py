"""Runs whose allocated memory somebody else has measured and published, and the settings that they were made with."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import memcalc
from memcalc.megatron.architecture import ARCHITECTURES, Architecture


class PublishedRun(NamedTuple):
    """`allocated` is in GiB, as printed."""

    name: str
    model: dict[str, Any]
    options: dict[str, Any]
    allocated: float
    source: str
    architecture: Architecture | None = None
    """What Megatron made of its options, where no model of transformers is that."""

    def estimate(self) -> memcalc.Report:
        if self.architecture is None:
            return memcalc.estimate(self.model, **self.options)
        architecture = self.architecture
        with patch.dict(ARCHITECTURES, {self.model["model_type"]: lambda _: architecture}):
            return memcalc.estimate(self.model, **self.options)


def _of(name: str, **changes: Any) -> dict[str, Any]:
    import json
    from pathlib import Path

    spec = json.loads((Path(__file__).resolve().parent.parent / "model_specs" / f"{name}.json").read_text())
    return spec.get("config", spec) | changes


_SIMUMAX = "SimuMax's published comparison: Megatron with Transformer Engine on 8 B200"
_B200: dict[str, Any] = {"gpu": "b200", "gpus": 8, "zero": 1, "seq_len": 4096, "cross_entropy": "fused"}

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
SIMUMAX_RUNS = (
    PublishedRun("Llama-3-70B, 12 layers, tp 2", _of("llama-3-70b", num_hidden_layers=12), {**_B200, "tp": 2}, 60.68, _SIMUMAX),
    PublishedRun("Llama-3-70B, 12 layers, tp 8", _of("llama-3-70b", num_hidden_layers=12), {**_B200, "tp": 8}, 28.29, _SIMUMAX),
    PublishedRun(
        "DeepSeek-V3, 4 layers, ep 8",
        _of("deepseek-v3", num_hidden_layers=4, first_k_dense_replace=1),  # three routed layers: four would be 112 GiB
        {**_B200, "ep": 8},
        104.30,
        _SIMUMAX,
    ),
)  # fmt: skip

PUBLISHED_RUNS = (*SIMUMAX_RUNS, *(run.published for run in MEGATRON_RUNS))


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

TORCHTITANS_OWN = {"peak": 68.63, "replayed": 82.38}
"""GiB of torchtitan's own model in the first of these runs (tests/torchtitan_oracle.py)."""

"""DeepSpeed 0.19.8 itself with its optimizer and its weights in files: bytes of the GPU, the host and the files, copies."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from deepspeed_oracle import OPTIONS, PRECISIONS
from engines.deepspeed.offloaded_traffic import estimated_copies, estimated_payloads, payloads
from nvme_oracle import Swapped, swapped_step

import memcalc
from memcalc.engines.transfers import in_files
from memcalc.offload.host import totals

LLAMA = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 3000, "head_dim": 64}  # fmt: skip
ONE = {**LLAMA, "num_hidden_layers": 1, "vocab_size": 2051}
UNEVEN = {**LLAMA, "intermediate_size": 2051, "vocab_size": 2103}
"""Sizes whose parts are no multiples of the alignment."""
LARGE = {**LLAMA, "intermediate_size": 4096, "vocab_size": 4200}
"""Parts of matrices of 1 MiB in 16 bits."""
WIDE = {**LARGE, "vocab_size": 12000}
"""A head that is larger than twice the other matrices."""
BUCKET = {"gpus": 2, "reduce_bucket_size": 1_200_000}
WIDER = {"gpus": 2, "reduce_bucket_size": 2_200_000, "params": "nvme"}
ALONE = {"max_live_parameters": 0, "max_reuse_distance": 0, "prefetch_bucket_size": 0}
"""Each module gathers its own weights, one by one, and keeps none."""


def buffers(count: int, size: int = 600_000, on_host: int = 0) -> dict[str, int]:
    return {"buffer_count": count, "buffer_size": size, "max_in_cpu": on_host}


CASES: list[tuple[Any, dict[str, Any]]] = [
    (UNEVEN, {**BUCKET, "clipping": 1.0}),
    (LARGE, {**WIDER, **ALONE, "of_params": buffers(3), "recompute": True}),
]  # fmt: skip
MORE: list[tuple[Any, dict[str, Any]]] = [
    (LLAMA, BUCKET),
    (UNEVEN, {"gpus": 1, "reduce_bucket_size": 3_000_000, "sub_group_size": 600_000, "precision": "fp16"}),
    (LLAMA, {**BUCKET, "params": "cpu", "param_persistence_threshold": 0}),
    (LLAMA, {**BUCKET, "sub_group_size": 400_000,
             "of_optimizer": {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}}),
    (LARGE, {**WIDER, **ALONE, "of_params": buffers(5), "optimizer": "none", "micro_batches": 2}),
    (WIDE, {**WIDER, "of_params": buffers(9, 1_600_000), "max_reuse_distance": 0, "prefetch_bucket_size": 1_200_000,
            "max_live_parameters": 4_000_000, "reduce_bucket_size": 3_200_000}),
    (ONE, {**BUCKET, "precision": "fp32", "param_persistence_threshold": 0, "recompute": True}),
    (ONE, {**BUCKET, "gpus": 3, "of_optimizer": {"buffer_count": 9}, "aio": {"intra_op_parallelism": 4}}),
    (LLAMA, {**BUCKET, "sub_group_size": 200_000, "micro_batches": 2}),
    (LLAMA, {**BUCKET, "frozen": ("model.embed_tokens",)}),
    (LLAMA, {**BUCKET, "params": "cpu", "reduce_bucket_size": 700_000, "micro_batches": 2}),
    (UNEVEN, {"params": "cpu", "gpus": 1, "reduce_bucket_size": 700_000}),
    (LARGE, {**WIDER, **ALONE, "gpus": 1, "of_params": buffers(5, 1_100_000)}),
    (LARGE, {**WIDER, **ALONE, "of_params": buffers(5, on_host=3_000_000), "optimizer": "cpu", "sub_group_size": 900_000}),
    (LARGE, {**WIDER, "of_params": buffers(9), "param_persistence_threshold": 1_500_000, "optimizer": "none"}),
    (WIDE, {**WIDER, "of_params": buffers(12, 1_600_000), "max_reuse_distance": 2_000_000, "prefetch_bucket_size": 300_000,
            "recompute": True, "precision": "fp32"}),
    (WIDE, {**WIDER, "of_params": buffers(12, 1_600_000), "prefetch_bucket_size": 300_000, "precision": "fp16",
            "frozen": ("model.embed_tokens",), "optimizer": "none"}),
    (LARGE, {**WIDER, "optimizer": "none"}),
]  # fmt: skip
STOPS: list[tuple[Any, dict[str, Any], str, str]] = [
    (LARGE, {**WIDER, "of_params": buffers(6)}, "Not enough buffers", "--nvme-buffer-count 6: a step wants more"),
    (LARGE, {**WIDER, "of_params": buffers(9)}, "already assigned", "--prefetch-bucket-size 50000000: with"),
    (LARGE, {**WIDER, "of_params": buffers(9, 500_000)}, "More elements", "--nvme-buffer-size 500000: a rank's part"),
    (LLAMA, {**BUCKET, "of_optimizer": {"buffer_count": 3}}, "", "--nvme-optimizer-buffer-count 3: the update"),
]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
each = pytest.mark.parametrize(("config", "how"), ALL, ids=str)
FREEZE = {("model.embed_tokens",): "embeddings"}


@cache
def _real(case: int) -> Swapped:
    config, how = [*CASES, *MORE][case]
    return swapped_step(config, **{OPTIONS.get(name, name): value for name, value in how.items()})


def real(config: Any, how: dict[str, Any]) -> Swapped:
    """A steady step of the first rank: the ranks of ZeRO-3 are alike."""
    return _real([*CASES, *MORE].index((config, how)))


def ours(config: Any, how: dict[str, Any]) -> memcalc.Report:
    of_optimizer, of_params = how.get("of_optimizer", {}), how.get("of_params", {})
    return memcalc.estimate(
        config,
        engine="deepspeed",
        gpus=how["gpus"],
        zero=3,
        seq_len=16,
        precision=PRECISIONS[how.get("precision", "bf16")],
        global_batch_size=how["gpus"] * how.get("micro_batches", 1),
        recompute="full" if how.get("recompute") else "none",
        clip_grad_norm=how.get("clipping", 0.0) > 0,
        freeze=FREEZE.get(how.get("frozen", ())),
        offload_optimizer=how.get("optimizer", "nvme"),
        offload_params=how.get("params", "none"),
        nvme_optimizer_buffer_count=of_optimizer.get("buffer_count"),
        nvme_buffer_count=of_params.get("buffer_count"),
        nvme_buffer_size=of_params.get("buffer_size"),
        nvme_max_in_cpu=of_params.get("max_in_cpu"),
        nvme_threads=how.get("aio", {}).get("intra_op_parallelism"),
        **{name: how[name] for name in OPTIONS if name in how},
    )


@each
def test_the_gpus_bytes(config: Any, how: dict[str, Any]) -> None:
    assert ours(config, how).phases == real(config, how).phases


@each
def test_the_hosts_bytes_and_the_files_are_those_of_its_ranks(config: Any, how: dict[str, Any]) -> None:
    """All ranks are on one node. What the allocator rounds up is no tensor."""
    found = real(config, how)
    kept = {kind: how["gpus"] * n for kind, n in (*found.host.items(), ("nvme", found.files))}
    tensors = [item for item in ours(config, how).host if "rounded up" not in item.name]
    assert totals(tensors) == kept


@each
def test_what_is_read_and_written(config: Any, how: dict[str, Any]) -> None:
    """Gradients wait in the buffers of the host, so the last of backward are written when the step begins."""
    report = ours(config, how)
    found: Counter[str] = Counter()
    for one in in_files(report.model, report.setup, report.rank):
        found["written" if one.way == "to NVMe" else "read"] += one.nbytes
    moved: Counter[str] = Counter()
    for (_, way), nbytes in real(config, how).moved.items():
        moved[way] += nbytes
    assert found == moved


@each
def test_what_is_sent(config: Any, how: dict[str, Any]) -> None:
    assert how["gpus"] == 1 or estimated_payloads(ours(config, how)) == payloads(real(config, how).sent)


@each
def test_what_is_copied(config: Any, how: dict[str, Any]) -> None:
    assert how.get("params", "none") == "none" or estimated_copies(ours(config, how)) == real(config, how).copied


@pytest.mark.parametrize(
    ("config", "how", "theirs", "message"), STOPS, ids=lambda one: one if isinstance(one, str) else ""
)
def test_deepspeed_stops_where_its_buffers_do_not_do(
    config: Any, how: dict[str, Any], theirs: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=theirs or None):
        swapped_step(config, **{OPTIONS.get(name, name): value for name, value in how.items()})
    with pytest.raises(memcalc.InputError, match=f"^{message}"):
        _ = ours(config, how).phases


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 2, "offload_optimizer": "nvme"}, "--offload-optimizer nvme: with ZeRO 2 DeepSpeed has no files"),
        ({"zero": 2, "offload_params": "nvme"}, "--offload-params nvme: with ZeRO 2"),
        ({"zero": 3, "offload_optimizer": "cpu", "nvme_threads": 2}, "--nvme-threads 2: is of DeepSpeed's files"),
        (
            {"zero": 3, "offload_optimizer": "nvme", "nvme_max_in_cpu": 0},
            "--nvme-max-in-cpu 0: is of DeepSpeed's files",
        ),
        (
            {"zero": 3, "offload_optimizer": "nvme", "optimizer": "lion"},
            "--offload-optimizer nvme: with optimizer lion",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(memcalc.InputError, match=f"^{message}"):
        memcalc.estimate(LLAMA, engine="deepspeed", gpus=2, **options)


def test_the_pinned_memory_of_deepspeeds_own_is_not_rounded_up() -> None:
    """csrc/aio locks whole pages; torch's allocator has the gradients and the blocks of weights."""
    report = ours(LLAMA, {**BUCKET, "params": "nvme"})
    rounded = next(item for item in report.host if "rounded up" in item.name)
    assert rounded.blocks == sum(item.blocks for item in report.host if item.name in ("gradients", "weights")
                                 if item.kind == "pinned")  # fmt: skip

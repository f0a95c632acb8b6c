"""DDP's buckets and collectives against torch's own reducer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_autocast import cuda_lists_on_the_cpu
from oracle import build
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import memcalc
from memcalc.core.dtypes import bf16
from memcalc.engines.ddp import buckets, gradient_sizes

UNTIED = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 7,
          "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 9000}  # fmt: skip
TIED = {**UNTIED, "tie_word_embeddings": True, "vocab_size": 30000, "num_hidden_layers": 3}
BIASED = {**UNTIED, "attention_bias": True, "mlp_bias": True}
GPT2 = {"model_type": "gpt2", "n_embd": 512, "n_layer": 7, "n_head": 8, "n_positions": 64, "vocab_size": 9000}
SMALL = {**UNTIED, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 500}


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def recorded_buckets(config: dict[str, Any], dtype: torch.dtype, *, autocast: bool = False) -> tuple[list[int], int]:
    """Bytes of the buckets that the second step all-reduces, and of the buffers that its forward broadcasts."""
    sizes: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations, and refuses ones that are strings
        sizes.append(bucket.buffer().untyped_storage().nbytes())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    module = build(config, "sdpa", dtype)
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, hook)
    ids = torch.zeros((1, 8), dtype=torch.int64)
    for _ in range(2):
        sizes.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return sizes, sum(b.numel() * b.element_size() for b in module.buffers())


@pytest.mark.live
@pytest.mark.parametrize("config", [UNTIED, TIED, SMALL], ids=["untied", "tied", "one bucket"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_buckets_and_buffers_are_what_ddp_sends(four_ranks: None, config: dict[str, Any], dtype: torch.dtype) -> None:
    model = memcalc.load_model(config)
    real, buffers = recorded_buckets(config, dtype)
    itemsize = dtype.itemsize
    assert buckets(gradient_sizes(model, itemsize)) == real
    precision = "bf16" if dtype is torch.bfloat16 else "fp32"
    report = memcalc.estimate(model, gpus=4, precision=precision, seq_len=8)
    reduce, broadcast = report.to_dict()["communication"]["items"]
    assert (reduce["collective"], reduce["calls"], reduce["payload"]) == ("all_reduce", len(real), sum(real))
    assert reduce["wire"] == 2 * 3 * sum(real) // 4
    assert (broadcast["collective"], broadcast["payload"], broadcast["wire"]) == ("broadcast", buffers, buffers)
    held = [i for i in report.items if i.name.startswith("DDP buckets")]
    assert [i.nbytes for i in held] == [sum(real)]


@pytest.mark.live
@pytest.mark.parametrize("config", [UNTIED, TIED, BIASED, GPT2], ids=["untied", "tied", "biased", "gpt2"])
def test_autocast_reduces_fp32_gradients(four_ranks: None, config: dict[str, Any]) -> None:
    model = memcalc.load_model(config)
    with cuda_lists_on_the_cpu():
        real, buffers = recorded_buckets(config, torch.float32, autocast=True)
    report = memcalc.estimate(model, gpus=4, precision="bf16-autocast", seq_len=8)
    assert buckets(gradient_sizes(model, 4, bf16)) == real
    sent = [(len(real), sum(real), "fp32"), (1, buffers, "fp32")]
    assert [(c.calls, c.payload, c.dtype) for c in report.collectives] == sent[: 2 if buffers else 1]
    assert [i.nbytes for i in report.items if i.name.startswith("DDP buckets")] == [sum(real)]


def test_a_bucket_closes_with_the_gradient_that_reaches_its_limit() -> None:
    assert buckets([4, 4, 4, 4, 4], first=5, cap=9) == [8, 12]
    assert buckets([], first=5, cap=9) == []


def test_accumulation_adds_no_all_reduce() -> None:
    once = memcalc.estimate("gpt2", gpus=2)
    thrice = memcalc.estimate("gpt2", gpus=2, global_batch_size=6)
    assert thrice.setup.micro_batches == 3
    assert [c.payload for c in once.collectives] == [c.payload for c in thrice.collectives]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tp": 2}, "--tp 2: accelerate combines DDP with no other axis .*allowed: 1, --engine fsdp2 --zero 2"),
        ({"cp": 2}, "--cp 2: accelerate combines DDP with no other axis .*cp_size"),
        ({"ep": 2}, "--ep 2: transformers shares experts among FSDP's ranks, not replicas"),
        ({"pp": 2}, "--pp 2: with engine ddp is not modelled by this version; allowed: 1, --engine fsdp2 --zero 2 or"),
    ],
)
def test_replicas_of_parts_are_refused(options: dict[str, int], line: str) -> None:
    model = "mixtral-8x7b" if "ep" in options else "llama-7b"
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.estimate(model, engine="ddp", gpus=8, **options)
    instead = {**options, "engine": "fsdp2", "zero": 2, "gpus": 8, "seq_len": 64, "global_batch_size": 8}
    assert memcalc.estimate(model, **instead).setup.engine == "fsdp2"


def test_replicas_of_slices_under_fsdp2() -> None:
    """What is named instead: nothing is gathered, and replicas sum their gradients."""
    report = memcalc.estimate("llama-7b", engine="fsdp2", gpus=8, tp=2, zero=2, shard_group=1, seq_len=64)
    assert {c.collective for c in report.collectives if c.axis == "dp"} == {"all_reduce"}


def test_transformers_shares_experts_among_shards() -> None:
    from transformers.distributed import DistributedConfig

    assert DistributedConfig(fsdp_size=4, ep_size=2).ep_size == 2
    with pytest.raises(ValueError, match="must divide"):
        DistributedConfig(dp_replicate_size=4, ep_size=2)


def test_what_wants_no_gradient_has_no_place_in_a_bucket() -> None:
    """Whisper's encoder has sinusoids for positions: 1500·768 numbers that are not trained."""
    report = memcalc.estimate("whisper-small", gpus=2, engine="ddp")
    trained = report.model.num_parameters - 1500 * 768
    assert report.to_dict()["model"]["trainable_parameters"] == trained
    (reduced,) = report.collectives
    assert reduced.payload == 2 * trained
    assert sum(item.nbytes for item in report.items if item.name.startswith("DDP buckets")) == 2 * trained


def test_buffers_are_sent_by_dtype() -> None:
    """Batch norm counts its batches in int64, one number for each of ResNet-50's 53."""
    report = memcalc.estimate("resnet-50", gpus=4, engine="ddp", precision="bf16")
    sent = {c.dtype: (c.calls, c.payload) for c in report.collectives if c.collective == "broadcast"}
    assert sent.keys() == {"bf16", "int64"}
    assert sent["int64"] == (1, 53 * 8)


def test_weights_without_a_gradient_are_refused() -> None:
    """DDP's reducer waits for them: the second step of the real one raises."""
    with pytest.raises(memcalc.InputError, match=r"--engine ddp: DDP fails .* as in this bert"):
        memcalc.estimate({"model_type": "bert", "tie_word_embeddings": False}, gpus=2, engine="ddp")
    assert memcalc.estimate("whisper-small", gpus=2).setup.engine == "ddp"  # those that want none are no matter

"""The oracle itself: under fake tensors it counts what it counts on real ones."""

from __future__ import annotations

import gc

import pytest
import torch
from cases import step_cases
from cuda_autocast import cuda_lists_on_the_cpu, fake_cuda
from oracle import LiveBytes, build, not_traced, training_step
from torch._subclasses.fake_tensor import FakeTensorMode

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 100}

BART = {"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 80, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32,
        "vocab_size": 100}  # fmt: skip


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_fake_tensors_count_as_real_ones(
    config: dict[str, object], attention: str, recompute: bool, padded: bool
) -> None:
    def run(real: bool) -> object:
        return training_step(
            config, micro_batch_size=2, seq_len=16, attention=attention, recompute=recompute, padded=padded, real=real
        )

    assert run(real=True) == run(real=False)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "bamba", "mamba2"])
def test_dims_of_one_lie_in_fake_tensors_as_in_real_ones(model_type: str) -> None:
    """At one token a view's strides decide how what is made of it lies, and so whether a later reshape copies."""
    (case,) = [case for case in step_cases(model_type) if case.seq == 1]

    def run(real: bool) -> object:
        return training_step(case.fields, micro_batch_size=2, seq_len=1, attention="eager", real=real)

    assert run(real=True) == run(real=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_decoder_behind_a_padded_encoder_counts_on_fake_tensors_as_on_real_ones(attention: str) -> None:
    """BART's decoder makes itself a mask of ones, which is dropped."""

    def run(real: bool) -> object:
        workload = {"micro_batch_size": 2, "seq_len": 16, "padded": True}
        return training_step(BART, attention=attention, real=real, **workload)

    assert run(real=True) == run(real=False)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_counts_on_real_tensors_as_on_fake_ones(config: dict[str, object], recompute: bool) -> None:
    def run(real: bool) -> object:
        return training_step(
            config, micro_batch_size=2, seq_len=16, dtype=torch.float32, autocast=torch.bfloat16, recompute=recompute,
            real=real,
        )  # fmt: skip

    assert run(real=True) == run(real=False)


def forward_under_autocast(config: dict[str, object], device: str, dtype: torch.dtype, recompute: bool) -> object:
    """Every allocation of a forward, its highest bytes, and what it leaves. Without sdpa: its kernel is the device's."""
    mode = LiveBytes()
    lists = cuda_lists_on_the_cpu() if device == "cpu" else fake_cuda()
    with lists, not_traced(), FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device(device):
            model = build(config, "eager", torch.float32)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for tensor in [*model.parameters(), *model.buffers()]:
            mode.register(tensor)
        ids = torch.zeros((2, 16), dtype=torch.int64, device=device)
        mode.log = []
        with mode:
            mode.register(ids)
            with torch.autocast(device, dtype):
                out = model(input_ids=ids, labels=ids)
            assert out.loss.device.type == device
            del out
            gc.collect()
        return mode.log, mode.highest, mode.now


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_cudas_lists_on_the_cpu_cast_as_on_cuda(config: dict[str, object], dtype: torch.dtype, recompute: bool) -> None:
    """With torch's own AutocastCUDA kernels, over fake CUDA tensors."""
    on_cpu, on_cuda = (forward_under_autocast(config, device, dtype, recompute) for device in ("cpu", "cuda"))
    assert on_cpu == on_cuda


def test_views_count_once_and_freed_storages_not_at_all() -> None:
    with LiveBytes() as mode:
        a = torch.empty(100)
        view = a[10:20].view(2, 5)
        assert mode.now == 400
        del a
        assert mode.now == 400
        del view
        assert mode.now == 0
        assert mode.highest == 400

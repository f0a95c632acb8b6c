"""The oracle itself: under fake tensors it counts what it counts on real ones."""

from __future__ import annotations

import pytest
import torch
from oracle import LiveBytes, training_step

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 100}


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

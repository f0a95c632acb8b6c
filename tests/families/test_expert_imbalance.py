"""`--expert-imbalance`: while all experts are on every rank no byte depends on how uneven routing is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import LiveBytes

import memcalc

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip


def bytes_of_experts(top_k_index: torch.Tensor) -> tuple[int, int, int]:
    """Saved bytes and the peaks of forward and backward of transformers' own experts, with these choices."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    fields = {name: value for name, value in MIXTRAL.items() if name != "model_type"}
    config = MixtralConfig(**fields, experts_implementation="grouped_mm")
    experts = MixtralExperts(config).to(torch.bfloat16)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    tokens, per_token = top_k_index.shape
    hidden_states = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.full((tokens, per_token), 1 / per_token, requires_grad=True)
    with LiveBytes() as mode:
        out = experts(hidden_states, top_k_index, weights).sum()
        saved, forward = mode.now, mode.highest
        mode.begin()
        out.backward()
        return saved, forward, mode.highest


def test_transformers_experts_cost_the_same_however_uneven_they_are() -> None:
    tokens, experts = 24, MIXTRAL["num_local_experts"]
    even = torch.stack([torch.arange(tokens) % experts, (torch.arange(tokens) + 1) % experts], dim=1)
    uneven = torch.tensor([[0, 1]] * tokens)
    assert torch.bincount(even.flatten()).tolist() == [8] * experts
    assert torch.bincount(uneven.flatten(), minlength=experts).tolist() == [24, 24, 0, 0, 0, 0]
    assert bytes_of_experts(even) == bytes_of_experts(uneven)
    assert bytes_of_experts(even[:-1]) != bytes_of_experts(even)


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("imbalance", [1, 1.5, 3.0])
def test_an_imbalance_changes_no_number_while_all_experts_are_on_every_rank(imbalance: float, gpus: int) -> None:
    balanced = memcalc.estimate(MIXTRAL, gpus=gpus).to_dict()
    document = memcalc.estimate(MIXTRAL, gpus=gpus, expert_imbalance=imbalance).to_dict()
    assert document.pop("setup") == {**balanced.pop("setup"), "expert_imbalance": imbalance}
    assert document == balanced


@pytest.mark.parametrize(
    ("config", "imbalance", "words"),
    [
        (MIXTRAL, 3.01, ("2 of 6 experts per token", "allowed: 1 to 3")),
        (MIXTRAL, 0.9, ("from 1 up",)),
        (MIXTRAL, float("nan"), ("from 1 up",)),
        (MIXTRAL, float("inf"), ("from 1 up",)),
        ({**MIXTRAL, "num_experts_per_tok": 6}, 1.1, ("6 of 6", "allowed: 1 to 1")),
        ("gpt2", 1.1, ("gpt2", "no routed experts", "allowed: 1.0")),
        ("llama-7b", 2, ("llama-7b", "no routed experts", "allowed: 1.0")),
    ],
)
def test_an_impossible_imbalance_is_refused(config: Any, imbalance: float, words: tuple[str, ...]) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(config, expert_imbalance=imbalance)
    line = str(error.value)
    assert line.startswith(f"--expert-imbalance {imbalance}: ")
    assert line.isprintable()
    for word in words:
        assert word in line


def test_a_dense_model_is_balanced() -> None:
    assert memcalc.estimate("gpt2", expert_imbalance=1).setup.expert_imbalance == 1

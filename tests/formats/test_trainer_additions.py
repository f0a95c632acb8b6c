"""packing, padding_free, activation_offloading and neftune_noise_alpha in the files of trainers, read and written."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import memcalc
from memcalc.estimation.emitted import emit

SFT: dict[str, Any] = {"max_length": 64, "bf16": True, "dtype": "bfloat16", "use_peft": True, "packing": False}
FLASH = {"attn_implementation": "flash_attention_2"}
ADDED = ("packing", "offload_activations", "neftune_alpha", "attention")


def report(model: str = "llama-7b", **content: Any) -> memcalc.Report:
    return memcalc.estimate(model, training_args=SFT | content)


def added(model: str = "llama-7b", **content: Any) -> tuple[Any, ...]:
    setup = report(model, **content).setup
    return tuple(getattr(setup, name) for name in ADDED)


def noted(model: str = "llama-7b", **content: Any) -> str:
    files = report(model, **content).files
    assert files is not None
    return " ".join(files.notes)


def test_read() -> None:
    assert added() == (False, "none", None, "sdpa")
    assert added(packing=True) == (True, "none", None, "sdpa")  # transformers' own attention, with a mask of blocks
    assert added(packing=True, **FLASH) == (True, "none", None, "flash")
    assert added(packing=True, model_init_kwargs=FLASH) == (True, "none", None, "flash")
    assert added(padding_free=True, **FLASH) == (True, "none", None, "flash")
    assert added(packing=False, **FLASH) == (False, "none", None, "flash")
    assert added(packing=True, packing_strategy="wrapped", **FLASH) == (False, "none", None, "flash")
    assert added(activation_offloading=True, neftune_noise_alpha=5) == (False, "cpu", 5, "sdpa")


def test_what_is_not_modelled_is_noted() -> None:
    """GPT-2's rows are counted as single sequences; the model's type decides, which the file's reader does not know."""
    assert added("gpt2", packing=True, activation_offloading=True, **FLASH) == (False, "none", None, "flash")
    said = noted("gpt2", packing=True, activation_offloading=True, **FLASH)
    assert "packing: rows are counted as single sequences" in said and "kept on the GPU" in said
    assert "packing" not in noted(packing=True, **FLASH) and "attn" not in noted(packing=True, **FLASH)


def test_given_options_win() -> None:
    setup = memcalc.estimate(
        "llama-7b", training_args=SFT | {"packing": True} | FLASH, packing=False, attention="sdpa"
    ).setup
    assert not setup.packing


def test_other_tools() -> None:
    """LLaMA-Factory's and axolotl's noise is the Trainer's."""
    factory = {"stage": "sft", "finetuning_type": "lora", "cutoff_len": 64, "neftune_noise_alpha": 5, "bf16": True}
    assert memcalc.estimate("llama-7b", training_args=factory).setup.neftune_alpha == 5
    axolotl = {"base_model": "llama-7b", "micro_batch_size": 1, "sequence_len": 64, "neftune_noise_alpha": 5, "adapter": "lora",
               "lora_r": 8, "lora_target_linear": True}  # fmt: skip
    assert memcalc.estimate("llama-7b", training_args=axolotl).setup.neftune_alpha == 5


@pytest.mark.parametrize(
    "options",
    [
        {"packing": True},
        {"packing": True, "attention": "sdpa", "neftune_alpha": 5.0},
        {"offload_activations": "cpu", "recompute": "full"},
    ],
    ids=str,
)
def test_written_and_read_again(options: dict[str, Any]) -> None:
    asked = {"task": "sft", "precision": "bf16-autocast", "seq_len": 64, "engine": "none"} | options
    setup = memcalc.estimate("llama-7b", **asked).setup
    text = emit("training-args", memcalc.load_model("llama-7b"), **asked).text
    again = memcalc.estimate("llama-7b", training_args=yaml.safe_load(text), engine="none").setup
    assert again == setup

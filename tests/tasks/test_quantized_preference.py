"""DPO and KTO over a quantised base, over a 16-bit base under autocast, and with trained modules beside adapters: against TRL's
own trainers and LM head, peft and bitsandbytes, every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LORA: dict[str, Any] = {"lora_rank": 4, "lora_targets": "all-linear", "micro_batch_size": 2, "seq_len": 32}
HALF: dict[str, Any] = LORA | {"precision": "bf16"}
NF4: dict[str, Any] = HALF | {"quantize": "nf4"}
INT8: dict[str, Any] = HALF | {"quantize": "int8"}
CAST: dict[str, Any] = LORA | {"precision": "bf16-autocast", "base_dtype": "bf16"}


def named(options: dict[str, Any]) -> str:
    return "-".join(f"{value}" for name, value in options.items() if name not in LORA) or "lora"


def same(options: dict[str, Any]) -> None:
    """Compare each number of a step with that of the real one."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    from tasks.trl_oracle import import_trl

    import_trl()
    if options.get("quantize", "none") != "none":
        pytest.importorskip("bitsandbytes")
    from memcalc.validate.run import validate

    comparison = validate(LLAMA, **options)
    rows = comparison.memory + comparison.communication
    assert [(row.name, row.predicted) for row in rows] == [(row.name, row.measured) for row in rows]


@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.parametrize("options", [NF4, INT8, CAST], ids=named)
def test_a_step(task: str, options: dict[str, Any]) -> None:
    same(options | {"task": task})


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.parametrize(
    "options",
    [
        NF4 | {"double_quant": True, "recompute": "full"},
        NF4 | {"precision": "bf16-autocast", "base_dtype": "bf16"},
        NF4 | {"precompute_reference": True},
        NF4 | {"quantize": "fp4", "lora_targets": "q_proj,v_proj", "lora_dropout": 0.1},
        NF4 | {"optimizer": "paged-adamw"},
        NF4 | {"engine": "ddp", "gpus": 4},
        NF4 | {"engine": "deepspeed", "gpus": 4, "zero": 2, "precision": "bf16-mixed"},
        NF4 | {"modules_to_save": "embed_tokens"},
        INT8 | {"recompute": "full"},
        INT8 | {"engine": "ddp", "gpus": 4},
        CAST | {"recompute": "full"},
        CAST | {"engine": "ddp", "gpus": 4},
        HALF | {"modules_to_save": "embed_tokens", "adapter_dtype": "bf16"},
        HALF | {"modules_to_save": "norm", "recompute": "full", "adapter_dtype": "bf16"},
    ],
    ids=named,
)
def test_more_steps(task: str, options: dict[str, Any]) -> None:
    same(options | {"task": task})


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_there_is_no_second_base(task: str) -> None:
    """The base with its adapters switched off is the reference, and its codes are held once."""
    report = memcalc.estimate(LLAMA, task=task, **NF4)
    assert not [item for item in report.items if item.name.startswith("reference")]
    assert report.total("parameters") < memcalc.estimate(LLAMA, task=task, **HALF).total("parameters")
    assert report.setup.adapter_dtype == "bf16"  # as TRL's trainers cast them


@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (NF4 | {"adapter_dtype": "fp32"}, "--adapter-dtype fp32: with --task {task} over a quantised base"),
        (NF4 | {"precision": "fp16"}, "--quantize nf4: with --task {task}, whose trainer casts adapters to bf16"),
        (NF4 | {"dora": True}, "--dora on: with --task {task}"),
        (NF4 | {"prepare_kbit_training": True}, "--prepare-kbit-training on: TRL does not call it"),
        (NF4 | {"lora_rank": 0, "lora_targets": None}, "--quantize nf4: quantised weights do not train"),
    ],
    ids=["fp32", "fp16", "dora", "kbit", "full"],
)
def test_refusals(task: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError) as error:
        memcalc.estimate(LLAMA, task=task, **options)
    assert str(error.value).startswith(why.format(task=task))

"""flash-attn 3 on Hopper: transformers' own forward around its kernels' tensors, to the byte, and what it does not take."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from validate.test_fake import LLAMA, MIXTRAL, same

import memcalc
from memcalc.kernels.flash_attention_3 import tiles
from memcalc.kernels.flash_checks import CHECKED
from memcalc.validate.with_flash import validate

THIRD: dict[str, Any] = {
    "attention": "flash", "flash_attention_version": 3, "precision": "bf16", "micro_batch_size": 2, "seq_len": 32,
}  # fmt: skip
WINDOWED = dict(step_cases("mistral")[0].fields) | {"sliding_window": 8, "head_dim": 16}
SHARDED: dict[str, Any] = {"engine": "fsdp2", "gpus": 2, "zero": 3, "precision": "bf16-mixed"}
ULYSSES: dict[str, Any] = {"engine": "deepspeed", "gpus": 2, "zero": 3, "precision": "bf16-mixed", "cp": 2}
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one token": (LLAMA, {"seq_len": 1}),
    "no shared heads": (LLAMA | {"num_key_value_heads": 6}, {"recompute": "full"}),
    "a window": (WINDOWED, {"seq_len": 64}),
    "a window, checkpoints": (WINDOWED, {"seq_len": 64, "recompute": "full"}),
    "per op": (LLAMA, {"recompute": "op"}),
    "experts": (MIXTRAL, {}),
    "autocast": (LLAMA, {"precision": "bf16-autocast"}),
    "adapters": (LLAMA, {"lora_rank": 4}),
    "tp": (LLAMA, SHARDED | {"tp": 2}),
    "stages": (LLAMA, SHARDED | {"pp": 2, "global_batch_size": 4}),
    "sequences": (LLAMA, ULYSSES),
    "padded": (LLAMA, {"padded": True, "seq_len": 200}),
    "padded, three sequences": (LLAMA | {"num_key_value_heads": 6}, {"padded": True, "micro_batch_size": 3}),
    "packed": (LLAMA, {"packing": True}),
    "packed, lengths": (LLAMA, {"packing": True, "seq_len": 64, "lengths": "16:1"}),
    "packed, a window": (WINDOWED, {"packing": True, "seq_len": 64}),
    "packed, a window that is longer": (WINDOWED, {"packing": True, "seq_len": 64, "lengths": "8:1"}),
}


def run(model: dict[str, Any], options: dict[str, Any]) -> None:
    for option, package in (("lora_rank", "peft"), ("packing", "trl")):
        if option in options:
            pytest.importorskip(package)
    if options.get("engine") == "deepspeed":
        pytest.importorskip("deepspeed")
    if "packing" in options:
        from tasks.trl_oracle import import_trl

        import_trl()
    same(validate(model, **THIRD | options))


@pytest.mark.parametrize("seq_len", [32, 128])
def test_a_step(seq_len: int) -> None:
    run(LLAMA, {"seq_len": seq_len})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MORE))
def test_more(name: str) -> None:
    run(*MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"recompute": "full"}, {"padded": True}, {"packing": True}], ids=str)
@pytest.mark.parametrize("width", [64, 80, 128, 160, 256])
def test_widths(width: int, options: dict[str, Any]) -> None:
    run(LLAMA | {"head_dim": width}, options)


@pytest.mark.slow
@pytest.mark.parametrize("family", CHECKED)
def test_families(family: str) -> None:
    for case in step_cases(family)[:3]:
        workload = {"micro_batch_size": case.batch, "seq_len": case.seq}
        try:
            memcalc.estimate(dict(case.fields), **THIRD | workload)
        except memcalc.InputError as error:
            assert "flash-attn 3 takes heads of a multiple of 8" in str(error)
            continue
        run(dict(case.fields), workload)


def test_a_layer_keeps_no_state_of_the_dropout() -> None:
    third, second = (
        memcalc.estimate(LLAMA, **THIRD | {"flash_attention_version": version}).total("saved_activations")
        for version in (3, 2)
    )
    assert second - third == 3 * 16


@pytest.mark.parametrize(
    ("width", "tile"),
    [(8, (64, 128, 128)), (96, (96, 64, 128)), (128, (128, 64, 128)), (136, (192, 64, 96)), (256, (256, 64, 80))],
)
def test_tiles(width: int, tile: tuple[int, int, int]) -> None:
    assert tiles(width) == tile


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"gpu": "a100-80gb"}, "on a100-80gb, of compute capability 8.0, which is not Hopper's 9.0, .*allowed: 2, or a Hopper"),
        ({"gpu": "b200"}, "on b200, of compute capability 10.0, "),
        ({"attention": "sdpa"}, "is of flash-attn in transformers' layers; allowed: with --attention flash"),
        ({"engine": "megatron", "precision": "bf16-mixed"}, "is of flash-attn in transformers' layers"),
        ({"model": LLAMA | {"head_dim": 20}}, "flash-attn 3 takes heads of a multiple of 8, not 20; allowed: 2, which widens"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError, match=f"--flash-attention-version 3: {line}") as error:
        memcalc.estimate(**{"model": "llama-7b"} | THIRD | options)
    assert "\n" not in str(error.value)


def test_a_hopper_gpu_has_it() -> None:
    report = memcalc.estimate("llama-7b", **THIRD | {"gpu": "h100-80gb"})
    assert report.setup.flash_attention_version == 3
    assert memcalc.estimate("llama-7b", attention="flash", precision="bf16").setup.flash_attention_version == 2

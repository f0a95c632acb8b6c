"""flash-attn in the files of trainers: where it is modelled, what is counted where it is not, and the note that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from drawn_setups import LLAMA, read_again, setup_of

import memcalc
from memcalc.errors import InputError
from memcalc.estimation.emitted import written
from memcalc.formats import given as given_module
from memcalc.inputs.model import load_model

SFT: dict[str, Any] = {"max_length": 64, "bf16": True, "dtype": "bfloat16", "packing": False, "use_peft": True}
FACTORY: dict[str, Any] = {"stage": "sft", "finetuning_type": "lora", "cutoff_len": 64, "bf16": True}
AXOLOTL: dict[str, Any] = {"base_model": "x", "sequence_len": 64, "micro_batch_size": 1, "bf16": True}
PLAIN: dict[str, Any] = {"per_device_train_batch_size": 1, "bf16": True}
KEY = {"attn_implementation": "flash_attention_2"}
SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
ASKING: list[dict[str, Any]] = [
    SFT | KEY, SFT | {"model_init_kwargs": KEY}, SFT | {"model_init_kwargs": '{"attn_implementation": "flash_attention_2"}'},
    PLAIN | {"use_flash_attn": True}, PLAIN | {"use_flash_attention_2": "yes"}, PLAIN | {"use_flash_attention": True},
    FACTORY | {"flash_attn": "fa2"}, FACTORY | {"flash_attn": True},
    AXOLOTL | {"flash_attention": True}, AXOLOTL | KEY,
]  # fmt: skip


def report(content: dict[str, Any], model: Any = SMALL, **options: Any) -> memcalc.Report:
    return memcalc.estimate(model, training_args=content, seq_len=64, **options)


def noted(found: memcalc.Report) -> str:
    assert found.files is not None
    return "\n".join(note for note in found.files.notes if "attn" in note or "attention" in note)


@pytest.mark.parametrize("content", ASKING, ids=str)
def test_a_file_that_asks_for_it(content: dict[str, Any]) -> None:
    found = report(content)
    assert found.setup.attention == "flash" and not noted(found)
    with_option = report(content, attention="sdpa")
    assert with_option.setup.attention == "sdpa" and not noted(with_option)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gpu": "v100-32gb"}, "compute capability 8.0"),
        ({"engine": "fsdp2", "gpus": 2, "zero": 3, "cp": 2, "precision": "bf16-mixed"}, "--cp 2"),
        ({"engine": "fsdp1", "gpus": 2, "zero": 3, "precision": "bf16-mixed"}, "engine fsdp1"),
    ],
)
def test_a_setup_that_it_is_not_modelled_with(options: dict[str, Any], why: str) -> None:
    content = PLAIN | KEY | {"max_grad_norm": 0}
    found = report(content, **options)
    assert found.setup.attention == "sdpa"
    assert "attn_implementation: flash-attn is counted as sdpa" in noted(found) and why in noted(found)
    with pytest.raises(InputError, match=r"--attention flash|--padded"):  # an option does not give way
        report(content, attention="flash", **options)


def test_a_type_that_it_is_not_modelled_for() -> None:
    falcon = {"model_type": "falcon", "num_hidden_layers": 2}
    found = report(PLAIN | KEY, falcon)
    assert found.setup.attention == "sdpa" and "for a falcon" in noted(found)
    eager = report(PLAIN | KEY, falcon, attention="eager")
    assert eager.setup.attention == "eager" and not noted(eager)


def test_kernels_that_are_not_modelled_are_noted_unless_an_option_replaces_them() -> None:
    for kernel in ("kernels-community/flash-attn2", "flex_attention"):
        found = report(PLAIN | {"attn_implementation": kernel})
        assert found.setup.attention == "sdpa" and kernel in noted(found)
        assert not noted(report(PLAIN | {"attn_implementation": kernel}, attention="eager"))


@pytest.mark.parametrize(
    "content", [PLAIN | {"attn_implementation": "flash_attention_3"}, FACTORY | {"flash_attn": "fa3"}], ids=str
)
def test_a_file_that_asks_for_the_third_version(content: dict[str, Any]) -> None:
    found = report(content, gpu="h100-80gb")
    assert (found.setup.attention, found.setup.flash_attention_version) == ("flash", 3) and not noted(found)
    ampere = report(content, gpu="a100-80gb")
    assert (ampere.setup.attention, ampere.setup.flash_attention_version) == ("sdpa", None)
    assert "flash-attn is counted as sdpa" in noted(ampere) and "9.0" in noted(ampere)
    for options in ({"attention": "sdpa"}, {"flash_attention_version": 2}):
        assert report(content, gpu="h100-80gb", **options).setup.flash_attention_version in (None, 2)


def test_an_option_replaces_the_files_version() -> None:
    third = PLAIN | {"attn_implementation": "flash_attention_3"}
    found = report(third, gpu="a100-80gb", attention="flash")
    assert (found.setup.attention, found.setup.flash_attention_version) == ("flash", 2)
    for content, why in ((PLAIN | KEY, "9.0"), (third, "9.0")):
        with pytest.raises(InputError, match=f"--flash-attention-version 3: .*{why}"):
            report(content, gpu="a100-80gb", flash_attention_version=3)


def test_packed_rows_on_other_gpus_are_counted_with_the_second_version() -> None:
    third = SFT | {"attn_implementation": "flash_attention_3", "packing": True}
    found = report(third, gpu="a100-80gb")
    assert (found.setup.packing, found.setup.attention, found.setup.flash_attention_version) == (True, "flash", 2)
    assert "flash-attn 3 is counted as flash-attn 2" in noted(found)
    assert report(third, gpu="h100-80gb").setup.flash_attention_version == 3


@pytest.mark.parametrize("version", [2, 3])
def test_another_engine_leaves_the_layers_attention(version: int) -> None:
    """A DeepSpeed section decides what belongs to its engine; the kernel is the model's."""
    content = PLAIN | {
        "attn_implementation": f"flash_attention_{version}",
        "deepspeed": {"zero_optimization": {"stage": 3}},
    }
    for options in ({}, {"engine": "fsdp2", "zero": 3}, {"engine": "ddp", "zero": 0}):
        found = report(content, gpus=2, precision="bf16-mixed" if options.get("engine") != "ddp" else "bf16", **options)
        assert (found.setup.attention, found.setup.flash_attention_version) == ("flash", version), options
    megatron = report(content, gpus=2, engine="megatron", zero=0, precision="bf16-mixed")
    assert megatron.setup.flash_attention_version is None and "Megatron-Core's layers" in noted(megatron)


def test_operands_of_fp32_are_refused_as_flash_attn_does() -> None:
    with pytest.raises(InputError, match=r"--attention flash: .*16 bits.*attn_implementation"):
        report({"per_device_train_batch_size": 1} | KEY)
    assert report({"per_device_train_batch_size": 1} | KEY, attention="sdpa").setup.attention == "sdpa"


def test_layers_of_megatron_have_their_own() -> None:
    for kind in ("flash_attention_2", "eager"):
        content = {"per_device_train_batch_size": 1, "attn_implementation": kind}
        found = report(content, engine="megatron", precision="bf16-mixed", gpus=2)
        assert found.setup.attention == "sdpa" and "Megatron-Core's layers" in noted(found)


def test_a_megatron_script_keeps_its_own_beside_it() -> None:
    arguments = {"attention_backend": "flash", "bf16": True, "micro_batch_size": 1, "seq_length": 64}
    found = memcalc.estimate(SMALL, megatron_args=arguments)
    assert found.setup.attention == "flash"


def test_the_gpu_of_this_machine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_module, "_gpu_of_this_machine", lambda: {"gpu": "v100-32gb"})
    found = report(PLAIN | KEY)
    assert (found.setup.gpu, found.setup.attention) == ("v100-32gb", "sdpa") and "v100" in noted(found)
    assert report(PLAIN | KEY, gpu="h100-80gb").setup.attention == "flash"


@pytest.mark.parametrize("options", [{"tp": "2"}, {"pp": [2]}, {"cp": {}}, {"gpu": 7}, {"padded": "x"}], ids=str)
def test_options_that_are_not_allowed_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"--{next(iter(options))}"):
        report(SFT | KEY, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"task": "sft", "precision": "bf16-autocast"},
        {"lora_rank": 4, "precision": "bf16"},
        {"task": "dpo", "lora_rank": 4, "precision": "bf16"},
        {"task": "sft", "engine": "deepspeed", "gpus": 2, "zero": 2, "precision": "bf16-mixed"},
        {"lora_rank": 4, "precision": "bf16", "packing": True},
    ],
    ids=str,
)
def test_written_and_read_again(options: dict[str, Any], tmp_path: Path) -> None:
    setup = setup_of({"attention": "flash", "seq_len": 64} | options, LLAMA)
    assert setup is not None
    out = written("training-args", setup, LLAMA)
    assert yaml.safe_load(out.text)["attn_implementation"] == "flash_attention_2" and "attention" not in out.unsaid
    assert read_again("training_args", out, setup, LLAMA, tmp_path / "args.yaml") == setup


def test_what_cannot_say_it_says_so() -> None:
    model = load_model(SMALL)
    setup = memcalc.estimate(
        SMALL, attention="flash", precision="bf16-mixed", seq_len=64, engine="deepspeed", gpus=2
    ).setup
    for format in ("deepspeed", "accelerate", "training-args"):
        assert "attention" in written(format, setup, model).unsaid

"""flash-attn of trainers' files together with the rest: where it is modelled, and what is counted where it is not.

Source: transformers/modeling_utils.py (_flash_attn_can_dispatch), transformers/integrations/flash_attention.py; what the package
itself takes, csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.errors import InputError
from memcalc.formats.asked import asked_options
from memcalc.inputs.model import Model
from memcalc.kernels.flash_version import flash_attention_version_of, runs_gpt_model

if TYPE_CHECKING:
    from memcalc.formats.found import Value
    from memcalc.inputs.options import Options

_AXES: Final = ("tp", "pp", "cp", "ep")


def with_flash_where_modelled(
    model: Any, given: Mapping[str, Any], said: Mapping[str, Value], of_trainer: Value | None
) -> tuple[dict[str, Value], list[str]]:
    """Return what files say, with the model's first attention in place of a flash-attn that is not modelled beside the rest,
    and a note of why. `of_trainer`: the attention that a trainer's file says; GPTModel does not have it.

    Operands of fp32 stay asked for, and are refused by the file's key: flash-attn raises for them, whatever is modelled.
    """
    attention = said.get("attention")
    if "attention" in given:
        said = _without_version(said)
    if attention is None or "attention" in given or not isinstance(model, Model) or model.model_type == "layers":
        return dict(said), []
    asked = asked_options(given, said)
    if asked is None:
        return dict(said), []
    engine = _engine(asked)
    if engine == "megatron":
        if of_trainer is None or attention.where != of_trainer.where:
            return dict(said), []
        out = {name: value for name, value in _without_version(said).items() if name != "attention"}
        return out, [f"{attention.where}: Megatron-Core's layers have their own attention, which is counted"]
    if attention.value != "flash" or runs_gpt_model(asked, engine):
        return _without_version(said), []
    why, kinds = _refused(asked, engine, model), model.program.attention_kinds
    if not why or not kinds or "flash_attention_version" in given:  # an option is refused with its reason
        return dict(said), []
    if asked.packing:
        again = f"{attention.where}: flash-attn 3 is counted as flash-attn 2 ({why})"
        return _without_version(said), [again] if asked.flash_attention_version == 3 else []
    scores = ", which keeps whole matrices of scores" if kinds[0] == "eager" else ""
    note = f"{attention.where}: flash-attn is counted as {kinds[0]}{scores} ({why})"
    return {**_without_version(said), "attention": attention._replace(value=kinds[0])}, [note]


def _without_version(said: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in said.items() if name != "flash_attention_version"}


def _engine(options: Options) -> str:
    """Return the engine as far as attention depends on it."""
    if options.engine is not None:
        return options.engine
    if options.gpus == 1:
        return "none"
    if options.autotp or (options.zero and all(getattr(options, axis) == 1 for axis in _AXES)):
        return "deepspeed"
    if any(getattr(options, axis) > 1 for axis in _AXES):
        return "fsdp2" if options.zero > 1 else "megatron"
    return "ddp"


def _refused(options: Options, engine: str, model: Model) -> str:
    """Return why flash-attn is not modelled; '' if it is."""
    from memcalc.kernels.flash_checks import check_flash

    try:
        check_flash(options, engine, "bf16" if options.precision == "fp32" else options.precision, model)
        flash_attention_version_of(options, "flash", engine, model)
    except InputError as error:
        return str(error)
    return ""

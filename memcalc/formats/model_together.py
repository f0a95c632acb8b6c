"""Files and the model together: kernels and adapters that a file asks for by a general name, and what this model has of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.families.base.linear_modules import linear_modules
from memcalc.formats.found import Value
from memcalc.formats.trainer_adapters import BY_NAME
from memcalc.inputs.model import Model
from memcalc.kernels import losses, refusal
from memcalc.kernels.liger_parts import parts_of
from memcalc.tuning.default_targets import FUSED

_LIGER_LOSSES = ("fused", "liger")


def with_what_the_model_has(
    model: Any, given: Mapping[str, Any], said: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """Return what files say, without kernels that are not modelled for this model, and a note for each that says what is
    counted in its place."""
    out, notes = dict(said), list[str]()
    _name_targets(model, given, out)
    if not isinstance(model, Model) or model.model_type == "layers" or _of(given, out, "engine") == "megatron":
        return out, notes
    _check_attention(model, given, out, notes)
    _check_liger(model, given, out, notes)
    _check_loss(model, given, out, notes)
    return out, notes


def _name_targets(model: Any, given: Mapping[str, Any], out: dict[str, Value]) -> None:
    """Put peft's word for all linear layers in the place of a list of their names, or the names where these mean other layers:
    that word takes all fused experts too (peft/utils/transformers_weight_conversion.py), and a file can name more."""
    targets = out.get("lora_targets")
    word, *more = str(targets.value).split(",") if targets is not None else ("",)
    if targets is None or word != BY_NAME:
        return
    names = "all-linear"
    if isinstance(model, Model):
        head = model.program.head_name.rpartition(".")[2]
        found = dict.fromkeys(path.rpartition(".")[2] for path, _ in linear_modules(model.program))
        linear = [name for name in found if name != head]
        if model.model_type in FUSED or not set(more) <= set(linear):
            names = ",".join(dict.fromkeys([*linear, *more]))
    out["lora_targets"] = targets._replace(value=names)


def _check_attention(model: Model, given: Mapping[str, Any], out: dict[str, Value], notes: list[str]) -> None:
    """Leave out a fused attention that memcalc does not have for this type."""
    attention, kinds = out.get("attention"), model.program.attention_kinds
    if attention is None or "attention" in given or _of(given, out, "packing") or attention.value in kinds or not kinds:
        return
    if attention.value == "sdpa":
        del out["attention"]
        notes.append(
            f"{attention.where}: fused attention is not modelled for a {model.model_type}; {kinds[0]} attention is counted, "
            "which keeps whole matrices of scores"
        )


def _check_liger(model: Model, given: Mapping[str, Any], out: dict[str, Value], notes: list[str]) -> None:
    """Leave out Liger's kernels where Liger leaves the type as it is, or they are not modelled, and parts that it does not
    have."""
    kernels, liger = out.get("kernels"), out.get("liger")
    if kernels is None or kernels.value != "fused" or "kernels" in given or "liger" in given:
        return
    if liger is not None:
        has = parts_of(model.model_type)
        parts = [part for part in str(liger.value).split("+") if part in has]
        if parts:
            out["liger"] = liger._replace(value="+".join(parts))
    why = refusal("fused", model.model_type, model.program.config, None if liger is None else out["liger"].value)
    if why is None:
        return
    for name in ("kernels", "liger"):
        out.pop(name, None)
    loss = out.get("cross_entropy")
    if loss is not None and loss.value in _LIGER_LOSSES and "cross_entropy" not in given:
        del out["cross_entropy"]
    notes.append(
        f"{kernels.where}: {why.partition(';')[0]}; transformers' own kernels and loss are counted, which keep more"
    )


def _check_loss(model: Model, given: Mapping[str, Any], out: dict[str, Value], notes: list[str]) -> None:
    """Leave out a loss that is not modelled for the type."""
    loss = out.get("cross_entropy")
    splits = _of(given, out, "tp") not in (None, 1)
    if loss is None or "cross_entropy" in given or (splits and _of(given, out, "engine") != "fsdp2"):
        return
    shares = _of(given, out, "cp") not in (None, 1)  # ranks that have parts of sequences have the model's own loss
    if splits and loss.value not in ("eager", "vocab-parallel"):
        del out["cross_entropy"]
        what = "with tensor parallelism over FSDP 2; the model's own loss is counted, which keeps all logits"
        notes.append(f"{loss.where}: is not modelled {what}")
    elif (
        not splits
        and loss.value != "eager"
        and (shares or loss.value not in losses(_of(given, out, "kernels") or "hf", model.model_type))
    ):
        del out["cross_entropy"]
        how = "with shared sequences" if shares else f"for a {model.model_type}"
        notes.append(f"{loss.where}: is not modelled {how}; the model's own loss is counted, which keeps all logits")


def _of(given: Mapping[str, Any], said: Mapping[str, Value], name: str) -> Any:
    return given.get(name, said[name].value if name in said else None)

"""Values of files that are not modelled beside the rest, and what is counted in the place of each: as many bytes, or more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memcalc.formats.found import Value
from memcalc.tasks import PREFERENCE

_SHARDED: Final = ("fsdp1", "fsdp2")
_STORING: Final = (*_SHARDED, "deepspeed", "megatron")
"""The engines whose mixed precision is their own, not autocast's."""
_OF_QUANTISED: Final = ("precision", "base_dtype", "quantize_compute_dtype")


def with_stand_ins(
    model: Any, given: Mapping[str, Any], said: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """Return what files say with the values that are counted in its place, and a note for each. A bare number of parameters,
    `model` None, has states alone, for which fp8 is modelled."""
    out, notes = dict(said), list[str]()
    if "precision" not in given:
        if model is not None:
            _replace_fp8(given, out, notes)
        _replace_fp16_of_trl(given, out, notes)
    if "optimizer" not in given:
        _replace_eight_bits(given, out, notes)
    return out, notes


def _replace_fp8(given: Mapping[str, Any], out: dict[str, Value], notes: list[str]) -> None:
    """Count products in fp8 as those in bf16: what trains is kept in more bits beside them."""
    precision = out.get("precision")
    if precision is None or precision.value != "fp8-mixed":
        return
    kind = "mixed" if _of(given, out, "engine") in _STORING else "autocast"
    out["precision"] = precision._replace(value=f"bf16-{kind}")
    notes.append(
        f"{precision.where} fp8: low precision is not modelled; bf16 is counted: about the same memory, more time"
    )


def _replace_fp16_of_trl(given: Mapping[str, Any], out: dict[str, Value], notes: list[str]) -> None:
    """Count a quantised base in fp16, whose adapters TRL casts to bf16, as one in bf16."""
    of_trl = _of(given, out, "task") in ("sft", *PREFERENCE)
    if not of_trl or _of(given, out, "quantize") in (None, "none") or not _of(given, out, "lora_rank"):
        return
    base, precision = _of(given, out, "base_dtype"), str(_of(given, out, "precision"))
    if base == "bf16" and precision.endswith("-autocast") and _of(given, out, "engine") in (None, "none", "ddp"):
        return  # modelled as it is
    found = [
        name for name in _OF_QUANTISED if name in out and name not in given and str(out[name].value).startswith("fp16")
    ]
    for name in found:
        out[name] = out[name]._replace(value=str(out[name].value).replace("fp16", "bf16"))
    if found:
        notes.append(
            f"{out[found[0]].where}: TRL casts adapters to bf16 over this base of fp16, which is counted as bf16, too"
        )


def _replace_eight_bits(given: Mapping[str, Any], out: dict[str, Value], notes: list[str]) -> None:
    """Count states of 8 bits over FSDP's shards as AdamW's own."""
    optimizer = out.get("optimizer")
    if (
        optimizer is None
        or _of(given, out, "engine") not in _SHARDED
        or not str(optimizer.value).endswith("adamw-8bit")
    ):
        return
    out["optimizer"] = optimizer._replace(value="adamw")
    notes.append(
        f"{optimizer.where} {optimizer.value}: 8-bit states over FSDP's shards are not modelled; AdamW's are counted, which "
        "take four times as much"
    )


def _of(given: Mapping[str, Any], said: Mapping[str, Value], name: str) -> Any:
    return given.get(name, said[name].value if name in said else None)

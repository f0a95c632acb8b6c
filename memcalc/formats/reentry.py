"""Checkpoints that re-enter autograd, as trainers' files ask for them, and as trainers decide whatever the files say.

Source: torch/utils/checkpoint.py (use_reentrant, which is True where it is left out), transformers/trainer.py
(gradient_checkpointing_kwargs, without which the models have False), trl/trainer/sft_trainer.py (1.16, "PEFT + DeepSpeed ZeRO-3
requires reentrant checkpointing", as in its other trainers), llamafactory/model/model_utils/checkpointing.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.tasks import OF_TRL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.formats.found import Value
    from memcalc.formats.section import Section
    from memcalc.formats.trainer_findings import Findings

OPTION: Final = "reentrant_checkpoints"
SWITCH: Final = "use_reentrant"
OF_LLAMA_FACTORY: Final = "use_reentrant_gc"
_NOT_TORCHS: Final = frozenset({SWITCH, "selective", "every_n_layers", "offload"})
"""The keys of `gradient_checkpointing_kwargs` that transformers and TRL take out, and the switch itself."""


def read_reentry(found: Findings, place: Section, switch: str, *, default: bool) -> None:
    """Set whether checkpoints re-enter if layers are recomputed. `default`: what the tool does where the switch is not there."""
    recompute = found.options.get("recompute")
    if recompute is None or recompute.value != "full":
        return
    given = place.flag(switch)
    if given is not None:
        found.options[OPTION] = place.value(switch, given)
    elif default:
        found.options[OPTION] = place.default(switch, True)


def torch_decides(kwargs: Section) -> bool:
    """Tell whether torch's default holds: arguments for its checkpoint are given, and the switch is not among them."""
    return bool(set(kwargs.content) - _NOT_TORCHS) and not kwargs.flag("selective")


def with_reentry_of_trainer(given: Mapping[str, Any], said: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """Return what files say, with checkpoints that re-enter where the trainer has them whatever the file says, and without them
    where it has none; and a note for each."""
    out = dict(said)
    reentry = out.pop(OPTION, None)
    values = {name: value.value for name, value in said.items()} | dict(given)
    if (
        OPTION in given or values.get("recompute") != "full" or values.get("quantize") == "int8"
    ):  # noted where it is read
        return out, []
    own = reentry is not None and OF_LLAMA_FACTORY in reentry.where
    if reentry is not None and reentry.value:
        return (out if own and values.get("engine") == "fsdp2" else out | {OPTION: reentry}), []
    shards = values.get("zero") == 3 and values.get("engine") in (None, "deepspeed")
    if own or "task" not in said or values["task"] not in OF_TRL or not values.get("lora_rank") or not shards:
        return out, []
    where = said["recompute" if "recompute" in said else "task"]
    what = "TRL's trainers let checkpoints of adapters under ZeRO-3 re-enter, whatever use_reentrant says"
    return out | {OPTION: where._replace(value=True)}, [f"{where.where}: {what}"]

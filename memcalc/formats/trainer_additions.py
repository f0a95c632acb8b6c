"""Additions of TRL's SFTTrainer and transformers' Trainer to a step: packed rows, activations on the host, noise.

Source: trl/trainer/sft_trainer.py, sft_config.py (1.16); transformers/training_args.py (5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.errors import InputError
from memcalc.formats.asked import asked_options
from memcalc.formats.trainer_findings import is_on
from memcalc.inputs.model import Model

if TYPE_CHECKING:
    from memcalc.formats.found import Value
    from memcalc.formats.trainer_findings import Findings
    from memcalc.inputs.options import Options

_ROWS: Final = "rows are counted as single sequences of the whole length"
NOT_COUNTED: Final = {
    "packing": _ROWS,
    "offload_activations": "activations are counted as kept on the GPU",
    "reentrant_checkpoints": "checkpoints are counted as those that do not re-enter autograd",
    "neftune_alpha": "the noise that NEFTune adds to the embeddings is not counted",
}


def read_additions(found: Findings, *, is_sft: bool) -> None:
    """Set what the trainer adds. TRL's own keys are SFTTrainer's; of other trainers they are noted."""
    read_noise(found)
    if is_sft and is_on(found.section, "activation_offloading"):
        found.give("offload_activations", "activation_offloading", "cpu")
    elif is_on(found.section, "activation_offloading"):
        found.note("activation_offloading", NOT_COUNTED["offload_activations"])
    _read_packing(found, is_sft=is_sft)


def read_noise(found: Findings) -> None:
    """Set NEFTune's noise."""
    key = "neftune_noise_alpha"
    alpha = found.section.number(key) if is_on(found.section, key) else None
    if alpha is not None and alpha <= 0:
        found.section.refuse(key, "allowed: a number above 0, or null")
    found.give("neftune_alpha", key, alpha)


def note_tf32(found: Findings) -> None:
    """Note TF32's products where some are of fp32: of all weights, or of adapters over a 16-bit base without autocast.

    Source: transformers/training_args.py (torch.backends.cuda.matmul.allow_tf32).
    """
    options = found.options
    precision = str(options["precision"].value) if "precision" in options else ""
    adapters = "lora_rank" in options and not precision.endswith(("-autocast", "-mixed"))
    in_half = "adapter_dtype" in options and options["adapter_dtype"].value != "fp32"
    if is_on(found.section, "tf32") and (precision == "fp32" or (adapters and not in_half)):
        found.note("tf32", "products of fp32 are timed without TF32; memory is the same")


def _read_packing(found: Findings, *, is_sft: bool) -> None:
    """Set packed rows. With the strategy `wrapped` a row is one sequence of the whole length.

    transformers' attention is sdpa unless the file says otherwise; over packed rows it has a mask of blocks then.
    """
    section = found.section
    key = next((key for key in ("packing", "padding_free") if is_on(section, key)), None)
    if key is None:
        return
    wrapped = key == "packing" and section.raw("packing_strategy") == "wrapped" and not is_on(section, "padding_free")
    if not is_sft or wrapped:
        found.note(key, _ROWS)
        return
    found.give("packing", key, True)
    if "attention" not in found.options:
        found.assume("attention", "attn_implementation", "sdpa")


def without_unmodelled_additions(
    model: Any, given: Mapping[str, Any], said: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """Return what files say, without what the trainer adds where that is not modelled beside the rest, and a note for each."""
    out, notes = dict(said), list[str]()
    names = [name for name in NOT_COUNTED if name in said and name not in given]
    if not names or not isinstance(model, Model):
        return out, notes
    asked = asked_options(given, said)
    if asked is None:
        return out, notes
    for name in names:
        why = _refused(name, asked, model)
        if not why:
            continue
        notes.append(f"{out.pop(name).where}: {NOT_COUNTED[name]} ({why})")
    return out, notes


def _refused(name: str, options: Options, model: Model) -> str:
    """Return why an addition is refused; '' if it is not."""
    from memcalc.tasks.neftune_checks import check_neftune
    from memcalc.tasks.offload_activations_checks import check_offloaded_activations
    from memcalc.tasks.packing_checks import check_packing
    from memcalc.tasks.reentrant_checks import check_reentrant

    engine = options.engine or ("deepspeed" if options.zero else "none" if options.gpus == 1 else "ddp")
    try:
        if name == "packing":
            check_packing(options, engine, options.precision, model)
        elif name == "offload_activations":
            check_offloaded_activations(options, engine, model)
        elif name == "reentrant_checkpoints":
            check_reentrant(options, engine, model)
        else:
            check_neftune(options, engine, model)
    except InputError as error:
        return str(error)
    return ""

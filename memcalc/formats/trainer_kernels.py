"""Attention and Liger-Kernel in the files of transformers' Trainer and of the tools over it."""

from __future__ import annotations

from typing import Final

from memcalc.formats.section import Section
from memcalc.formats.trainer_findings import Findings, is_on, mapping

PARTS: Final = ("rope", "rms_norm", "swiglu", "geglu")
"""Liger's parts of the layers, which `--liger` names."""
FLASH: Final = "flash_attention_2"
"""The flash-attn package, as transformers calls it."""
VERSIONS: Final = {FLASH: 2, "flash_attention_3": 3}
"""The versions of the package, by their names there."""
_AS_SDPA: Final = "counted as torch's own fused attention (sdpa)"


def read_attention(found: Findings, section: Section, key: str) -> None:
    """Set attention by `attn_implementation`: eager, sdpa, flash-attn, or a fused kernel that keeps what sdpa does."""
    text = section.text(key)
    if text is None:
        return
    word = text.strip().lower()
    if word in ("eager", "sdpa"):
        found.options["attention"] = section.value(key, word)
        return
    if word in VERSIONS:
        found.options["attention"] = section.value(key, "flash")
        found.options["flash_attention_version"] = section.value(key, VERSIONS[word])
        return
    if "flash" not in word and "/" not in word and word not in ("flex_attention", "xformers", "sage", "fp8"):
        section.refuse(
            key, "allowed: eager, sdpa, flash_attention_2, flash_attention_3, flex_attention, a kernel's path"
        )
    found.options["attention"] = section.value(key, "sdpa")
    found.notes.append(f"{section.where(key)} {word}: {_AS_SDPA}")


def read_liger(found: Findings, keys: tuple[str, ...], *, own_loss: bool) -> None:
    """Set Liger's kernels as transformers' `use_liger_kernel` and `liger_kernel_config` do.

    `own_loss`: the trainer has a head of its own, with which Liger's layers are not modelled.
    Source: transformers/integrations/liger.py; liger_kernel/transformers/monkey_patch.py.
    """
    section = found.section
    key = next((key for key in keys if is_on(section, key)), None)
    if key is None:
        return
    if own_loss:
        found.note(key, "Liger's layers are counted as transformers' own, which keep as much or more")
        return
    config = mapping(section, "liger_kernel_config")
    switches = {part: config.flag(part) for part in (*PARTS, "cross_entropy", "fused_linear_cross_entropy")}
    if any(switches[part] is False for part in PARTS):
        gate = "swiglu" if switches["geglu"] is None else "geglu"  # a model has one of them
        give_parts(found, key, tuple(part for part in ("rope", "rms_norm", gate) if switches[part] is not False))
    else:
        found.give("kernels", key, "fused")
    fused, plain = switches["fused_linear_cross_entropy"], switches["cross_entropy"]
    loss = "liger" if plain else "eager" if fused is False else "fused"
    found.give("cross_entropy", key, loss)


def give_parts(found: Findings, key: str, parts: tuple[str, ...]) -> None:
    """Set the parts of Liger that are on in the layers; without any, Liger has the loss alone."""
    if parts:
        found.give("kernels", key, "fused")
        found.give("liger", key, "+".join(parts))
    else:
        found.give("kernels", key, "hf")

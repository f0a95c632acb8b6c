"""The parts of Liger-Kernel that a model has on, by the names of the arguments of `apply_liger_kernel_to_*`."""

from __future__ import annotations

import re

from memcalc.errors import InputError, one_line
from memcalc.families import support_of

SEPARATORS = ",+"


def parts_of(model_type: str) -> tuple[str, ...]:
    """Return the parts of a type's layers; () for a type that Liger-Kernel leaves as it is."""
    from memcalc.kernels.liger import PATCHES

    patches = support_of(model_type).liger
    return () if patches is None else tuple(PATCHES[patches])


def chosen_parts(text: str | None, model_type: str) -> tuple[str, ...]:
    """Return the parts that are on, in Liger's order: those that `text` names with commas or plus signs, or all for None.

    Raise InputError for an empty name and for one that the type does not have.
    """
    allowed = parts_of(model_type)
    if text is None:
        return allowed
    given = [name.strip().replace("-", "_") for name in re.split(f"[{SEPARATORS}]", text)]
    for name in given:
        if name not in allowed:
            words = f"{model_type} has no part {one_line(name) or repr(name)}"
            raise InputError(f"--liger {one_line(text)}: {words}; allowed: {', '.join(allowed)}, with commas or +")
    return tuple(name for name in allowed if name in given)

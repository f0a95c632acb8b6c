"""Model families: each a program that reads like its `forward()`, found by transformers' `model_type`."""

from __future__ import annotations

from typing import Final

FAMILIES: Final[dict[str, tuple[str, str]]] = {
    "llama": ("memcalc.families.llama", "Llama"),
}
"""`model_type` -> module and class, imported when it is asked for."""

"""The fields that every family's `config.json` is read with: strict, frozen, bounded.

A field that is left out has transformers' own default for that `model_type`; a field that memcalc does not know is
ignored, as transformers does, unless it changes what is computed (`REFUSED`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=10**7)]
"""A dim of the architecture. The bound only catches nonsense: no published model has a dim of ten million."""

Layers = Annotated[int, Field(ge=1, le=10**4)]
Probability = Annotated[float, Field(ge=0, lt=1)]

Activation = Literal["silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "gelu_new", "gelu_fast", "tanh", "linear"]
"""Names of transformers' ACT2FN that `blocks.act` writes out."""


class FamilyConfig(BaseModel):
    """Fields of one `model_type`. pydantic's ValidationError names the field, its value and what is allowed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", populate_by_name=True)

    refused: ClassVar[dict[str, Any]] = {}
    """Fields that would change the program, with the only value of each that this family's program has."""


def check_divides(config: BaseModel, whole: str, part: str) -> None:
    """ValueError unless field `part` (if given) divides field `whole`."""
    total, divisor = getattr(config, whole), getattr(config, part)
    if divisor is not None and total % divisor:
        raise ValueError(f"{whole} {total} does not divide by {part} {divisor}")

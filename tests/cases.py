"""The cases of each family: small models that are like no default. `tests/families/cases/<model_type>.json` holds

- `parameters`: configurations whose weights and buffers are compared by name, order and shape;
- `steps`: a configuration and a workload each, whose saved bytes and peaks are compared. `dtypes` (default bf16) says in
  which dtypes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "families" / "cases"


DROPOUTS = (
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "attention_dropout", "hidden_dropout", "activation_dropout",
    "resid_dropout", "embed_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop",
)  # fmt: skip
"""Every name that a configuration has for a dropout."""


class Case(NamedTuple):
    """A small model and a workload."""

    model_type: str
    name: str
    batch: int
    seq: int
    fields: dict[str, Any]
    dtypes: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.model_type}-{self.name}"


@cache
def read(model_type: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{model_type}.json").read_text(encoding="utf-8"))


def model_types() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def parameter_cases(model_type: str) -> list[dict[str, Any]]:
    """config.json fields of this type, its default first."""
    return [{"model_type": model_type, **fields} for fields in ({}, *read(model_type)["parameters"])]


def step_cases(model_type: str) -> list[Case]:
    return [
        Case(
            model_type,
            step["name"],
            step["batch"],
            step["seq"],
            {"model_type": model_type, **step["config"]},
            tuple(step.get("dtypes", ("bf16",))),
        )
        for step in read(model_type)["steps"]
    ]

"""The cases of each family: small models that are like no default. `tests/families/cases/<model_type>.json` holds

- `parameters`: configurations whose weights and buffers are compared by name, order and shape, the type's defaults
  among them unless `default` is false: transformers cannot build a model of some types' own defaults;
- `balanced`: true where the bytes depend on which experts are chosen: the trace is of real tensors, with balanced routing;
- `real`: true where fake tensors have other dtypes than real ones: the trace is of real tensors;
- `steps`: a configuration and a workload each, whose saved bytes and peaks are compared. `dtypes` (default bf16) says in
  which dtypes. Where paper and trace differ, `differs` has both numbers, [paper, trace], by run ("bf16-sdpa-none") and
  quantity ("saved", "forward", "backward"), and `why` the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

AUTO_CLASSES = {
    "modernbert": "AutoModelForMaskedLM",
    "deberta-v2": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "bart": "AutoModelForSeq2SeqLM",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "resnet": "AutoModelForImageClassification",
}
"""transformers' auto class of a model type that is not trained as a causal language model, whatever `architectures` names."""


def auto_class(fields: Mapping[str, Any]) -> str:
    """transformers' auto class of a config.json."""
    masked = any(name.endswith("ForMaskedLM") for name in fields.get("architectures") or ())
    return AUTO_CLASSES.get(fields["model_type"], "AutoModelForMaskedLM" if masked else "AutoModelForCausalLM")


FOLDER = Path(__file__).resolve().parent / "families" / "cases"


DROPOUTS = (
    "residual_dropout",
    "embedding_dropout",
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "attention_dropout", "hidden_dropout", "activation_dropout",
    "resid_dropout", "embed_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop", "mlp_dropout",
    "dropout_rate",
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
    differs: dict[str, dict[str, list[int]]]
    why: str
    balanced: bool
    real: bool

    @property
    def id(self) -> str:
        return f"{self.model_type}-{self.name}"


@cache
def read(model_type: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{model_type}.json").read_text(encoding="utf-8"))


def model_types() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def parameter_cases(model_type: str) -> list[dict[str, Any]]:
    """config.json fields of this type, its default first where that can be run."""
    cases = read(model_type)
    default: list[dict[str, Any]] = [{}] if cases.get("default", True) else []
    return [{"model_type": model_type, **deepcopy(fields)} for fields in (*default, *cases["parameters"])]


def step_cases(model_type: str) -> list[Case]:
    return [
        Case(
            model_type,
            step["name"],
            step["batch"],
            step["seq"],
            {"model_type": model_type, **deepcopy(step["config"])},  # transformers writes into what it is given
            tuple(step.get("dtypes", ("bf16",))),
            step.get("differs", {}),
            step.get("why", ""),
            read(model_type).get("balanced", False),
            read(model_type).get("real", False),
        )
        for step in read(model_type)["steps"]
    ]

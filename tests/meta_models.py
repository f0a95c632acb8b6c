"""Names and shapes of transformers' own models on the meta device, on record."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from cases import auto_class
from records import on_record

Shapes = list[tuple[str, tuple[int, ...]]]


class Built(NamedTuple):
    """What transformers makes of a config.json: its weights and buffers in their order, or the class of what it raises."""

    parameters: Shapes
    buffers: Shapes
    raised: str = ""


def model_of(fields: dict[str, Any]) -> Any:
    """transformers' model on the meta device."""
    import transformers

    kept = deepcopy(fields)
    auto = getattr(transformers, auto_class(kept))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return auto.from_config(transformers.AutoConfig.for_model(kept.pop("model_type"), **kept))


@on_record
def built(fields: dict[str, Any]) -> Built:
    return shapes_of(model_of(fields))


@on_record
def tried(fields: dict[str, Any]) -> Built:
    """The same of a configuration that transformers may refuse."""
    try:
        return shapes_of(model_of(fields))
    except Exception as error:
        return Built([], [], type(error).__name__)


def shapes_of(model: torch.nn.Module) -> Built:
    return Built(
        [(name, tuple(weight.shape)) for name, weight in model.named_parameters()],
        [(name, tuple(buffer.shape)) for name, buffer in model.named_buffers()],
    )

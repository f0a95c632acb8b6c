"""Files of layers (docs/layers.md): a model as a list of torch.nn's layers, in YAML or JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from memcalc.errors import InputError, one_line, quoted
from memcalc.formats.found import Found, Value
from memcalc.formats.loading import load
from memcalc.inputs.model import Model

OPTION: Final = "--layers"


def read(file: str, content: Mapping[str, Any]) -> Found:
    """Return the model that a file describes. Raises InputError: the file, the layer, the value, what is allowed."""
    return Found({}, Value(_model(file, content), file or OPTION))


def load_layers(
    source: str | os.PathLike[str] | Mapping[str, Any] | list[Any], *, input: Any = None, loss: str | None = None
) -> Model:
    """Return the model of a file of layers, of its content as a mapping, or of a list of layers with an `input`.

    `memcalc.estimate(memcalc.load_layers("vgg16.yaml"), micro_batch_size=32)`. Raises InputError, which names the problem
    in one line.
    """
    if isinstance(source, list):
        source = {"layers": source}
    if not isinstance(source, (str, os.PathLike, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"{OPTION} {one_line(source)}: allowed: a path, a mapping of a file's content, a list of layers"
        )
    file, content = load(OPTION, source)
    given = {name: value for name, value in (("input", input), ("loss", loss)) if value is not None}
    for name, value in given.items():
        if content.get(name, value) != value:
            where = f" {one_line(file)}" if file else ""
            raise InputError(
                f"{OPTION}{where}: {name} is {quoted(content[name])} in it and {quoted(value)} beside it; give one"
            )
    return _model(file, {**content, **given})


def _model(file: str, content: Mapping[str, Any]) -> Model:
    from memcalc.families import FAMILIES

    family = FAMILIES["layers"].program
    place = f"{OPTION} {one_line(file)}" if file else OPTION
    try:
        program = family(family.Config.read(content))
    except ValueError as error:
        raise InputError(f"{place}: {one_line(error, 400)}") from None
    named = content.get("name")
    name = named if isinstance(named, str) and named.strip() else Path(file).stem if file else "layers"
    fields = cast("dict[str, Any]", {"model_type": "layers", **content})
    return Model(one_line(name), "layers", program, fields, program.notes)

"""Suites: lists of cases in a JSON file, bundled by name or a user's own.

{"about": "…", "cases": [{"model": …, "layers": 4, option: value, …}, …]}: `model` as for --model, or the fields of a
config.json. With `layers` the model is cut to its first layers. Options have underscores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from memcalc.errors import InputError, nearest, one_line, quoted
from memcalc.inputs.files import read_json_object
from memcalc.inputs.model import load_model
from memcalc.inputs.options import Options

Case = Mapping[str, Any]

SUITES: Final[Mapping[str, str]] = {
    "quick": "a minute or two with --backend fake: one case of each engine, precision and kind of model",
    "gpu": "one GPU of 80 GB or more with --backend cuda: models cut to a few layers and whole small ones, every option",
    "fine-tuning": "a few minutes with --backend fake: quantised bases in shards, packed rows, offload, optimizers, TRL's tasks",
}
"""The bundled suites, each a file of its name in suites/."""

_COUNTS: Final = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
"""The names of a config.json for its number of layers."""


def read_suite(name: str) -> list[Case]:
    """Return the cases of a bundled suite, or of a file. Raises InputError for a name that is neither, and for a file
    that is no suite."""
    path = Path(__file__).parent / "suites" / f"{name}.json" if name in SUITES else Path(name)
    if name not in SUITES and not path.suffix and not _there(path):
        close = nearest(name, SUITES)
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise InputError(f"--suite {one_line(name)}: unknown; {hint}allowed: {', '.join(SUITES)}, or a file")
    cases: list[Case] = [*cases_of(path, "--suite")]
    for i, case in enumerate(cases):
        named = f"--suite {one_line(name)}: case {i + 1}"
        if not isinstance(case.get("model"), str | dict):
            raise InputError(f"{named}: field `model` is {quoted(case.get('model'))}; it should be a name or an object")
        if "backend" in case:
            raise InputError(f"{named}: field `backend` is the suite's; allowed: --backend")
        for option in case.keys() - {"model", "layers"} - set(Options._fields):
            close = nearest(option, Options._fields)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise InputError(f"{named}: field {quoted(option)} is no option of a setup{hint}")
    return cases


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long or has a null byte is no file
        return False


def cases_of(path: Path, option: str) -> list[dict[str, Any]]:
    """Return the list `cases` of a JSON document. Raises InputError if there is none."""
    cases: object = read_json_object(path, option, "a JSON file with a list `cases`").get("cases")
    entries: list[object] = cast("list[object]", cases) if isinstance(cases, list) else []
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        shown = quoted(cast("object", cases)) if not entries else "a list that holds something else"
        raise InputError(f"{option} {one_line(path)}: field `cases` is {shown}; it should be a list of objects")
    return cast("list[dict[str, Any]]", entries)


def options_of(case: Case) -> dict[str, Any]:
    """Return the options of a case's setup."""
    return {name: value for name, value in case.items() if name not in ("model", "layers")}


def model_of(case: Case) -> Any:
    """Return the model of a case for `memcalc.estimate`: the name, or the fields of the cut model."""
    return case["model"] if "layers" not in case else cut(case["model"], case["layers"])


def cut(model: Any, layers: object) -> dict[str, Any]:
    """Return the config.json of a model's first `layers` layers (of an encoder-decoder: of each stack).

    Raises InputError if there are fewer layers, or if the configuration does not say how many there are.
    """
    whole = load_model(model)
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= whole.layers:
        raise InputError(
            f"field `layers` {quoted(layers)}: {whole.name} has {whole.layers}; allowed: 1 to {whole.layers}"
        )
    fields = dict(whole.fields or {})
    counts = [name for name in _COUNTS if isinstance(fields.get(name), int)]
    lengths = {fields[name] for name in counts}
    for name in counts:
        fields[name] = min(layers, fields[name])
    for name, value in fields.items():
        if isinstance(value, list) and len(cast("list[object]", value)) in lengths and "layer" in name:
            fields[name] = cast("list[object]", value)[:layers]
    fields["_name_or_path"] = f"{whole.name}, {layers} layers" if layers > 1 else f"{whole.name}, 1 layer"
    if not counts or (layers < max(lengths) and load_model(fields).layers >= whole.layers):
        raise InputError(f"field `layers` {layers}: the configuration of {whole.name} has no field that says how many")
    return fields

"""`memcalc models`: the bundled models, or one model with its parameters by component."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

EPILOG = """Examples:
memcalc models
memcalc models qwen --type qwen3
memcalc models llama-7b --json
"""


def models(
    name: Annotated[str | None, typer.Argument(help="A model (name, alias, Hub id, path) or a part of a name.")] = None,
    model_type: Annotated[str | None, typer.Option("--type", help="Only this model_type.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List the bundled models, or show one."""
    from memcalc.errors import InputError, one_line
    from memcalc.inputs.model import bundled_spec, load_model, model_names
    from memcalc.report.models import list_document, print_list, print_model, show_document

    names = model_names()
    if name is not None and (bundled_spec(name) is not None or not any(name.lower() in n for n in names)):
        model = load_model(name)
        if model_type is not None and model.model_type != model_type:
            raise InputError(f"--type {one_line(model_type)}: {model.name} is of type {model.model_type}")
        _emit(show_document(model), json) if json else print_model(model, sys.stdout)
        return
    chosen = [load_model(n) for n in names if name is None or name.lower() in n]
    if model_type is not None:
        known = sorted({m.model_type for m in chosen})
        if model_type not in known:
            raise InputError(f"--type {one_line(model_type)}: no such model here; allowed: {', '.join(known)}")
        chosen = [m for m in chosen if m.model_type == model_type]
    _emit(list_document(chosen), json) if json else print_list(chosen, sys.stdout)


def _emit(document: object, json: bool) -> None:
    import json as library

    print(library.dumps(document, indent=1, ensure_ascii=False))

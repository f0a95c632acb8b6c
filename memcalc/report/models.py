"""Tables and documents of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any, Final

from rich.table import Table
from rich.text import Text

from memcalc.core.dims import formula, numel
from memcalc.inputs.model import Model, bundled_spec
from memcalc.report.consoles import LISTING, console_for
from memcalc.report.fitting import Column
from memcalc.report.folding import Folded
from memcalc.report.listing import print_columns
from memcalc.units import show_count


def list_document(models: Sequence[Model]) -> list[dict[str, Any]]:
    """Return one object for each model."""
    return [_summary(model) for model in models]


def _summary(model: Model) -> dict[str, Any]:
    spec = bundled_spec(model.name)
    return {
        "name": model.name,
        "model_type": model.model_type,
        "parameters": model.num_parameters,
        "active_parameters": model.active_parameters,
        "layers": model.layers,
        "aliases": [] if spec is None else spec["aliases"],
        "published": None if spec is None else spec["published"],
    }


def show_document(model: Model) -> dict[str, Any]:
    """Return one model with its weights."""
    return {
        **_summary(model),
        "notes": list(model.notes),
        "by_component": model.parameters_by_component(),
        "weights": [
            {
                "name": w.name,
                "shape": [[d.name, d.size] for dim in w.shape for d in dim.parts],
                "copies": model.copies(w),
            }
            for w in model.weight_classes
        ],
    }


_FIRST_TO_GO: Final = ("also", "layers", "type")


def print_list(models: Sequence[Model], file: IO[str]) -> None:
    """Print a line for each model."""
    specs = [bundled_spec(model.name) for model in models]
    columns = [
        Column("name", [model.name for model in models], "left"),
        Column("type", [model.model_type for model in models], "left"),
        Column("parameters", [show_count(model.num_parameters) for model in models]),
        Column("layers", [str(model.layers) for model in models]),
        Column("also", ["" if spec is None else ", ".join(spec["aliases"]) for spec in specs], "left"),
    ]
    print_columns(columns, _FIRST_TO_GO, file)


def print_model(model: Model, file: IO[str]) -> None:
    """Print the parameters by component, then every weight with its named dims."""
    console = console_for(file, LISTING)
    spec = bundled_spec(model.name)
    title = Text(model.name, style="bold")
    title.append(f"  {model.model_type}, {model.layers} layers, {model.num_parameters:,} parameters", style="not bold")
    console.print(title)
    if model.active_parameters != model.num_parameters:
        console.print(f"active per token: {model.active_parameters:,}")
    if model.program.source:
        console.print(f"memcalc has no program of this model type: {model.program.source}")
    for note in model.notes:
        console.print(note)
    if spec is not None:
        published = spec["published"]
        console.print(f"published: {published['parameters']} ({published['source']})")
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("component")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    for component, count in model.parameters_by_component().items():
        table.add_row(component, f"{count:,}", f"{100 * count / model.num_parameters:.2f}%")
    console.print(table)
    weights = Table(header_style="bold", box=None, pad_edge=False)
    weights.add_column("weight", overflow="fold")
    weights.add_column("shape", overflow="fold")
    weights.add_column("copies", justify="right")
    weights.add_column("parameters", justify="right", no_wrap=True)
    for w in model.weight_classes:
        sizes = "×".join(str(d.size) for d in w.shape)
        weights.add_row(
            Folded(w.name),
            Folded(f"{formula(w.shape)} = {sizes}"),
            str(model.copies(w)),
            f"{model.copies(w) * numel(w.shape)[0]:,}",
        )
    console.print()
    console.print(weights)

"""`memcalc estimate --explain-setup`: each option's value, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

from memcalc.inputs.file_options import FILES
from memcalc.inputs.options import option_name
from memcalc.report.document import SCHEMA_VERSION, model_document, setup_document
from memcalc.report.input_notes import input_notes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_GIVEN: Final = "option"
_DEFAULT: Final = "default"


class Origin(NamedTuple):
    """An option of a setup as resolved, and where its value came from."""

    option: str
    value: Any
    where: str


def origins(report: Report, given: Mapping[str, Any]) -> list[Origin]:
    """Return every option of the setup, those from options and files first. `given`: the options as given."""
    found: Mapping[str, str] = {} if report.files is None else report.files.origins
    out = [
        Origin(name, value, _GIVEN if name in given and name not in FILES else found.get(name, _DEFAULT))
        for name, value in setup_document(report).items()
    ]
    return sorted(out, key=lambda one: (one.where == _DEFAULT, one.where == _GIVEN))


def origins_document(report: Report, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON document: the model, the setup and the origin of each of its values, the notes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_document(report),
        "setup": setup_document(report),
        "origins": {one.option: one.where for one in origins(report, given)},
        "notes": input_notes(report),
    }


def print_origins(report: Report, given: Mapping[str, Any], file: TextIO, width: int) -> None:
    """Print the options that no default decided as a table, the others in one line, and the notes."""
    rows = origins(report, given)
    chosen = [(option_name(one.option), _shown(one.value), one.where) for one in rows if one.where != _DEFAULT]
    names, values = (max((len(one[column]) for one in chosen), default=0) for column in (0, 1))
    lines = [f"{report.model.name}: where its setup came from", ""]
    for name, value, where in chosen:
        start = f"{name:<{names}}  {value:<{values}}  "
        if len(start) + len(where) <= width:
            lines.append(start + where)
        else:
            lines += [start.rstrip(), *_wrapped(f"    {where}", width)]
    defaults = [f"{option_name(one.option)} {_shown(one.value)}" for one in rows if one.where == _DEFAULT]
    lines += ["", *_wrapped(f"Defaults: {', '.join(one for one in defaults if not one.endswith(' None'))}", width)]
    for note in input_notes(report):
        lines += ["", *_wrapped(f"Note: {note}", width)]
    file.write("\n".join(lines) + "\n")


def _wrapped(text: str, width: int) -> list[str]:
    from textwrap import wrap

    return wrap(text, max(width, 40), subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)


def _shown(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)

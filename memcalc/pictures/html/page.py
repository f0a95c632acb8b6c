"""The page of a report: one file without any request, with its style and its scripts inside."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from memcalc.core.collector import without_collections
from memcalc.pictures.html.communication import communication
from memcalc.pictures.html.components import patterns
from memcalc.pictures.html.head import head
from memcalc.pictures.html.lanes import schedule
from memcalc.pictures.html.markup import Markup, element, joined
from memcalc.pictures.html.phases import phases
from memcalc.pictures.html.ranks import ranks
from memcalc.pictures.html.remarks import remarks, suggestions
from memcalc.pictures.html.rows import collectives, rows
from memcalc.pictures.html.step import step
from memcalc.report.title import setup_line

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_SCRIPTS: Final = ("tables.js", "step.js")


@without_collections()
def page(report: Report) -> str:
    """Return the page. It needs no network, and everything but sorting, searching and the cursor works without a script."""
    parts = {
        "memory": ("Memory", phases(report)),
        "step": ("Step", step(report)),
        "ranks": ("Ranks", ranks(report)),
        "communication": ("Communication", communication(report)),
        "schedule": ("Schedule", schedule(report)),
        "advice": ("Advice", suggestions(report)),
        "notes": ("Notes", remarks(report)),
        "rows": ("Rows", rows(report)),
        "collectives": ("Collectives", collectives(report)),
    }
    shown = {name: (label, part) for name, (label, part) in parts.items() if part is not None}
    links = [element("li", element("a", label, href=f"#{name}")) for name, (label, _) in shown.items()]
    body = element(
        "body",
        patterns(),
        element("a", "Skip to the numbers", href="#memory", class_="skip"),
        head(report),
        element("nav", element("ul", *links), aria_label="Parts of the page"),
        element("main", *(part for _, part in shown.values())),
        element("footer", element("p", _made_by())),
        *(element("script", Markup(_text(name))) for name in _SCRIPTS),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{joined([_head(report), body])}</html>\n'


def _head(report: Report) -> Markup:
    style, scripts = _text("page.css"), [_text(name) for name in _SCRIPTS]
    allowed = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}; "
        "base-uri 'none'; form-action 'none'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=allowed),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"memcalc: {setup_line(report)}"),
        element("style", Markup(style)),
    )


def _made_by() -> str:
    from memcalc import __version__

    return (
        f"memcalc {__version__}. Sizes are of one GPU; GiB is 2^30 bytes. Every size has its exact bytes as its title."
    )


def _text(name: str) -> str:
    return files("memcalc.pictures.html").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"

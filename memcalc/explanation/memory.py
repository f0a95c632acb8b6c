"""Sections of the components of memory: each row is in one step, and the steps add up to the component's total."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.explanation.folding import Group, Term, steps_of, term_of
from memcalc.explanation.places import OTHER, place_of
from memcalc.explanation.reasons import reason
from memcalc.explanation.step import Section
from memcalc.explanation.words import Words
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.core.rows import Item
    from memcalc.estimation.report import Report

TITLES: Final = {
    "parameters": Words("Weights", "权重"),
    "gradients": Words("Gradients", "梯度"),
    "optimizer_states": Words("Optimizer states", "优化器状态"),
    "saved_activations": Words("Activations at the end of forward", "前向结束时的激活值"),
    "buffers": Words("Buffers", "缓冲区"),
    "temporaries": Words("Temporaries at the peak", "峰值时刻的临时张量"),
}
REST: Final = Words("{rows} smaller rows", "其余 {rows} 行（较小）")
TOTAL: Final = Words("Total: {nbytes:,} B = {shown}.", "合计：{nbytes:,} B = {shown}。")
_NAMES: Final = Words("{place}: {names}", "{place}：{names}")
_MOST_NAMES: Final = 6
_BY_PLACE: Final = ("parameters", "gradients", "saved_activations")
"""Components whose rows are explained by their place in the model."""
_OF_WEIGHTS: Final = ("gradients", "optimizer_states")
"""Components with a row for each weight."""
_LAYERS: Final = re.compile(r"^[^*]*\*[.:] ?")
_NUMBER: Final = re.compile(r"\.\d+\.")


class _Key(NamedTuple):
    """The key of rows that are shown in one step."""

    what: str
    dtype: str


def component_section(report: Report, component: str, language: str) -> Section:
    """Return a component's section: the most that exists of it in a step; of temporaries, those at the peak."""
    items = [item for item in report.items if item.component == component and item.nbytes]
    steps = steps_of(_groups(report, items, language), "bytes", lambda rows: REST.said(language, rows=rows))
    total = sum(step.result for step in steps)
    text = (TOTAL.said(language, nbytes=total, shown=show_bytes(int(total))),) if len(steps) > 1 else ()
    return Section(TITLES[component].said(language), steps, text)


def _groups(report: Report, items: Iterable[Item], language: str) -> Iterable[Group]:
    found: dict[_Key, list[Item]] = defaultdict(list)
    for item in items:
        found[_Key(_HEADINGS[item.component](item, language), item.dtype)].append(item)
    for key, rows in found.items():
        terms = tuple(_term(report, item) for item in rows)
        why = reason(report, rows[0], language)
        yield Group(_what(key, rows, language), why, terms, tuple(item.source for item in rows))


def _term(report: Report, item: Item) -> Term:
    return term_of(item, item.nbytes, report.model.layers)


def _what(key: _Key, rows: list[Item], language: str) -> str:
    """Return words for a row: its place and kind, or its own name."""
    component = rows[0].component
    if len(rows) == 1 and (component not in _BY_PLACE or key.what == OTHER.called.said(language)):
        return rows[0].name
    names = list(dict.fromkeys(_short(item.name, component, key.what) for item in rows))
    if not names or key.what in names:
        return key.what
    more = len(names) - _MOST_NAMES
    shown = names[:_MOST_NAMES] + ([f"… +{more}"] if more > 0 else [])
    return _NAMES.said(language, place=key.what, names=", ".join(shown))


def _short(name: str, component: str, what: str) -> str:
    """Return a row's name without the path to its layer and without the words `what`; for gradients and states, the name of
    their weight."""
    inner = _LAYERS.sub("", name.split(" (")[0])
    if component in _OF_WEIGHTS:
        inner = inner.rsplit(": ", 1)[0]
    return inner.removeprefix(f"{what}: ").removesuffix(f": {what}").removesuffix(".weight")


def _by_place(item: Item, language: str) -> str:
    return place_of(item.name).called.said(language)


def _by_state(item: Item, _language: str) -> str:
    """Return the state that a row is of: "exp_avg" of "lm_head.weight: exp_avg"."""
    return item.name.rsplit(": ", 1)[-1]


def _by_name(item: Item, _language: str) -> str:
    """Return a row's name without its size, its tensor and the number of its layer."""
    return _NUMBER.sub(".*.", item.name.split(" (")[0].rsplit(": ", 1)[-1])


_HEADINGS: Final[dict[str, Callable[[Item, str], str]]] = {
    "parameters": _by_place,
    "gradients": _by_place,
    "optimizer_states": _by_state,
    "saved_activations": _by_place,
    "buffers": _by_name,
    "temporaries": _by_name,
}

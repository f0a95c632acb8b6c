"""The timeline of a step: what is alive at every moment, stacked by component, with a cursor that goes through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from memcalc.errors import InputError
from memcalc.pictures.html.bars import if_near
from memcalc.pictures.html.columns import Changes, changes, columns_of, with_small_ones_together
from memcalc.pictures.html.components import LABELS, labelled, swatch
from memcalc.pictures.html.markup import Cell, Markup, drawing, element, of_bytes, of_count, section, size, table
from memcalc.pictures.html.step_data import data_block
from memcalc.pictures.html.step_plot import BAND, HEIGHT, areas, band, band_legend, grid, peak_mark
from memcalc.pictures.timeline import timeline_of
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.pictures.timeline import Timeline

STACKED: Final = (
    "parameters", "optimizer_states", "gradients", "saved_activations", "buffers", "temporaries", "allocator",
)  # fmt: skip
"""The components from below: those that vary least come first."""
_HEADROOM: Final = 1.08
_EMPTY: Final = Cell("")
_MOST_CHANGES: Final = 9000
_LEAST: Final = (0, 4096, 1024, 256, 64, 16)
"""The parts of the peak below which names are put together, tried one after the other; 0 puts none together."""
_SHOWN: Final = 15
"""The names in the table of what is alive. step.js shows as many."""


def step(report: Report) -> Markup:
    """Return the picture and what is alive at the peak; where the order of a step is not known, the reason."""
    if report.states_only:
        words = "Model states alone have no timeline: what a step allocates is not known without a model."
        return section("step", "Timeline of a step", element("p", words))
    try:
        timeline = timeline_of(report)
    except InputError as error:
        words = "There is no timeline of this setup."
        return section("step", "Timeline of a step", element("p", words), element("p", str(error), class_="remark"))
    moments = columns_of(timeline)
    found = _readable(timeline, moments)
    return section(
        "step",
        "Timeline of a step",
        element("p", _words(timeline, moments, piped=report.setup.pp > 1), class_="lead"),
        *(element("p", note, class_="remark") for note in timeline.notes),
        _legend(found, moments.index(timeline.peak_event)),
        element("div", _plot(timeline, moments, found), band_legend(timeline.spans), _controls(), class_="step"),
        _alive(found, moments.index(timeline.peak_event), timeline),
        data_block(timeline, moments, found, STACKED),
    )


def _words(timeline: Timeline, moments: Sequence[int], *, piped: bool) -> str:
    who = f"pipeline rank {timeline.rank}" if piped else "a GPU"
    every = timeline.events + 1
    thinned = (
        "" if len(moments) == every else f" Of about {every // len(moments)} moments in a row the fullest is drawn."
    )
    return (
        f"What {who} has allocated at {every:,} moments, each after an allocation or a free: tensors, and what the allocator "
        f"adds to them. The peak is {show_bytes(timeline.peak)}.{thinned} Time is not to scale."
    )


def _readable(timeline: Timeline, moments: Sequence[int]) -> list[Changes]:
    """Return the bytes by name over the columns. Names of small blocks are put together while there is too much to carry."""
    every = found = changes(timeline.blocks, moments)
    for part in _LEAST:
        if part:
            found = changes(timeline.blocks, moments, with_small_ones_together(every, timeline.peak // part))
        if sum(len(own.columns) for own in found) <= _MOST_CHANGES:
            break
    return found


def _legend(found: Sequence[Changes], column: int) -> Markup:
    """Return the components with their bytes at the cursor, which begins at the peak."""
    used = [one for one in STACKED if any(own.key.component == one for own in found)]
    entries = [
        element(
            "li",
            element("span", swatch(one), LABELS[one], " ", size(_sum(found, one, column)), class_="labelled"),
            data_component=one,
        )
        for one in used
    ]
    return element("ul", *entries, class_="legend at-cursor")


def _sum(found: Sequence[Changes], component: str, column: int) -> int:
    return sum(own.at(column) for own in found if own.key.component == component)


def _plot(timeline: Timeline, moments: Sequence[int], found: Sequence[Changes]) -> Markup:
    capacity = if_near(timeline.capacity, timeline.peak)
    top = max(timeline.peak * _HEADROOM, capacity or 0)
    stack = [(one, [own for own in found if own.key.component == one]) for one in STACKED]
    used = [(one, own) for one, own in stack if own]
    picture = drawing(
        f"What is alive in a step; the peak is {show_bytes(timeline.peak)}",
        "Stacked by component, from the first allocation of the step to the last. The table below says what is alive at the "
        "cursor.",
        areas(used, len(moments), top),
        grid(top, capacity),
        peak_mark(moments.index(timeline.peak_event), len(moments), timeline.peak, top),
        band(timeline.spans, timeline.events + 1),
        element("line", x1="0", x2="0", y1=0, y2=HEIGHT + BAND, class_="cursor", visibility="hidden"),
        identifier="step-picture", width="100%", height=HEIGHT + BAND,
    )  # fmt: skip
    return element("div", picture, class_="plot", id="step-plot")


def _controls() -> Markup:
    """Return the cursor's buttons and its words, which a script shows."""
    buttons = [
        element("button", words, type="button", data_go=where)
        for where, words in (("back", "← before"), ("on", "after →"), ("peak", "to the peak"))
    ]
    words = element("output", "", id="step-words", aria_live="polite")
    hint = "With the picture focused: arrow keys, Page Up and Page Down, Home and End, P for the peak."
    return element("div", *buttons, words, element("span", hint, class_="hint"), class_="controls", hidden="")


def _alive(found: Sequence[Changes], column: int, timeline: Timeline) -> Markup:
    """Return the table of what is alive at the peak. A script writes into it what is alive at the cursor."""
    alive = sorted((own for own in found if own.at(column)), key=lambda own: -own.at(column))
    lines = [
        _line(Cell(own.key.name, code=True), own.at(column), Cell(labelled(own.key.component)))
        for own in alive[:_SHOWN]
    ]
    rest = alive[_SHOWN:]
    if rest:
        lines.append(_line(Cell(f"{len(rest)} more"), sum(own.at(column) for own in rest)))
    lines.append(_line(Cell("all"), timeline.peak))
    own = table(
        "Alive at the peak", ["name", "size", "component", "bytes"], lines, last_is_total=True, id="step-alive",
        data_shown=str(_SHOWN),
    )  # fmt: skip
    return element("div", own, class_="alive")


def _line(name: Cell, nbytes: int, component: Cell = _EMPTY) -> list[Cell]:
    return [name, of_bytes(nbytes), component, of_count(nbytes)]

"""The timeline's numbers for the page's script, as JSON in the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memcalc.pictures.html.components import LABELS
from memcalc.pictures.html.markup import Markup

if TYPE_CHECKING:
    from memcalc.pictures.html.columns import Changes
    from memcalc.pictures.timeline import Span, Timeline


def data_block(
    timeline: Timeline, moments: Sequence[int], found: Sequence[Changes], components: Sequence[str]
) -> Markup:
    """Return a script element that is only data: the columns' moments, the spans, and by name the bytes from column to
    column."""
    phases = list(dict.fromkeys(span.phase for span in timeline.spans))
    content = {
        "last": timeline.events,
        "peak": moments.index(timeline.peak_event),
        "moments": _differences(moments),
        "spans": [
            [phases.index(span.phase), _number(span), span.chunk, span.first, span.last] for span in timeline.spans
        ],
        "phases": phases,
        "components": list(components),
        "labels": [LABELS[component] for component in components],
        "alive": [
            [components.index(own.key.component), own.key.name, _differences(own.columns), own.nbytes] for own in found
        ],
    }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
    return Markup(f'<script type="application/json" id="step-data">{_harmless(text)}</script>')


def _number(span: Span) -> int:
    """Return the number of the span's micro-batch, from 1 on; 0 without one."""
    return 0 if span.micro_batch is None else span.micro_batch + 1


def _differences(numbers: Sequence[int]) -> list[int]:
    return [after - before for before, after in zip([0, *numbers], numbers, strict=False)]


def _harmless(text: str) -> str:
    """Return JSON without the characters that could end the element it is in."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

"""The components' names, and the pattern that each is drawn with: a colour, and lines or dots that tell it without colour."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from memcalc.pictures.html.markup import Markup, element

LABELS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "saved_activations": "saved activations",
    "buffers": "buffers",
    "temporaries": "temporaries",
    "allocator": "allocator",
    "reserved": "fragmentation",
    "device": "CUDA context, NCCL",
}
"""The components in the order in which they are stacked."""

_MARKS: Final = {
    "parameters": "",
    "gradients": "M-2 2l4-4M0 8l8-8M6 10l4-4",
    "optimizer_states": "M1.5 2h1.6M5.5 6h1.6",
    "saved_activations": "M0 4h8",
    "buffers": "M0 0l8 8M0 8l8-8",
    "temporaries": "M4 0v8",
    "allocator": "M-2 6l4 4M0 0l8 8M6-2l4 4",
    "reserved": "M0 1.5h8M0 5.5h8",
    "device": "M2 0v8M0 6h8",
}
"""The path that is drawn over a component's colour, in a tile of 8 by 8."""


def fill(component: str) -> str:
    return f"url(#c-{component})"


def patterns() -> Markup:
    """Return the patterns of all components, in a picture that takes no room."""
    tiles = [
        element(
            "pattern",
            element("rect", width=8, height=8, class_=f"c-{component}"),
            element("path", d=mark, class_="mark") if mark else None,
            id=f"c-{component}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for component, mark in _MARKS.items()
    ]
    return element("svg", element("defs", *tiles), class_="patterns", width=0, height=0, aria_hidden="true")


def swatch(component: str) -> Markup:
    """Return a small square of a component's pattern."""
    square = element("rect", width=14, height=14, rx=2, fill=fill(component))
    return element("svg", square, width=14, height=14, class_="swatch", aria_hidden="true")


def labelled(component: str) -> Markup:
    """Return a component's square and its name."""
    return element("span", swatch(component), LABELS[component], class_="labelled")


def legend(components: Iterable[str]) -> Markup:
    return element("ul", *(element("li", labelled(one)) for one in components), class_="legend")

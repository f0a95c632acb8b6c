"""HTML and SVG as text: elements whose words are escaped, sizes with their exact bytes, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, NamedTuple

from memcalc.units import show_bytes

_VOID: Final = frozenset(("input", "meta", "br"))
_SHAPES: Final = frozenset(("rect", "line", "path", "circle", "use"))


class Markup(str):
    """Text that is markup already. Any other text is escaped."""

    __slots__ = ()


def element(tag: str, *children: str | None, **attributes: str | int | float | None) -> Markup:
    """Return an element. A child or an attribute that is None is left out.

    In the names of attributes `_` stands for `-`, and one at the end is dropped (`class_`).
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    opened = "".join([tag, *(f' {name}="{escape(str(value))}"' for name, value in given.items())])
    inside = joined(child for child in children if child is not None)
    if tag in _VOID:
        return Markup(f"<{opened}>")
    if tag in _SHAPES and not inside:
        return Markup(f"<{opened}/>")
    return Markup(f"<{opened}>{inside}</{tag}>")


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Return parts one after the other, each escaped unless it is markup."""
    return Markup(between.join(part if isinstance(part, Markup) else escape(part) for part in parts))


def size(nbytes: int) -> Markup:
    """Return bytes for people in binary units, with the exact number as the element's value and title."""
    return element("data", show_bytes(nbytes), value=nbytes, title=f"{nbytes:,} B")


def exact_size(nbytes: int) -> Markup:
    """Return bytes for people, and the exact number below them."""
    return joined([size(nbytes), element("span", f"{nbytes:,} B", class_="exact")])


class Cell(NamedTuple):
    """The content of a table's cell, and the number by which its column is sorted (None: by its text)."""

    content: str
    number: int | float | None = None
    numeric: bool = False
    """True if the cell is aligned to the right."""
    code: bool = False
    """True for formulas and names, which may break anywhere."""


def of_bytes(nbytes: int) -> Cell:
    return Cell(size(nbytes), nbytes, numeric=True)


def of_exact_bytes(nbytes: int) -> Cell:
    return Cell(exact_size(nbytes), nbytes, numeric=True)


def of_count(count: int) -> Cell:
    return Cell(f"{count:,}", count, numeric=True)


def table(
    caption: str, header: Sequence[str], lines: Iterable[Sequence[Cell]], *, last_is_total: bool = False,
    **attributes: str,
) -> Markup:  # fmt: skip
    """Return a table in a box of its own that can be scrolled, also with the keyboard. The first cell of a line is its
    heading."""
    rows = list(lines)
    numeric = [cell.numeric for cell in rows[0]] if rows else [False] * len(header)
    head = element(
        "tr",
        *(
            element("th", name, scope="col", class_="number" if right else None)
            for name, right in zip(header, numeric, strict=True)
        ),
    )
    body, foot = (rows[:-1], rows[-1:]) if last_is_total else (rows, [])
    own = element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", *map(_line, body)),
        element("tfoot", *map(_line, foot)) if foot else None,
        **attributes,
    )
    return element("div", own, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _line(cells: Sequence[Cell]) -> Markup:
    first, *others = cells
    return element("tr", _cell("th", first, scope="row"), *(_cell("td", cell) for cell in others))


def _cell(tag: str, cell: Cell, **attributes: str) -> Markup:
    words = [word for word, applies in (("number", cell.numeric), ("code", cell.code)) if applies]
    return element(tag, cell.content, class_=" ".join(words) or None, data_n=cell.number, **attributes)


def section(identifier: str, title: str, *parts: str | None) -> Markup:
    """Return a section of the page with its heading."""
    heading = element("h2", title, id=f"{identifier}-title")
    return element("section", heading, *parts, id=identifier, aria_labelledby=f"{identifier}-title")


def lines(texts: Iterable[str], **attributes: str) -> Markup:
    """Return a paragraph for each text."""
    return joined(element("p", text, **attributes) for text in texts)


def drawing(title: str, description: str, *shapes: str, identifier: str, **attributes: str | int) -> Markup:
    """Return an SVG picture with a title and a description that screen readers read."""
    return element(
        "svg",
        element("title", title, id=f"{identifier}-t"),
        element("desc", description, id=f"{identifier}-d"),
        *shapes,
        role="img",
        aria_labelledby=f"{identifier}-t",
        aria_describedby=f"{identifier}-d",
        **attributes,
    )

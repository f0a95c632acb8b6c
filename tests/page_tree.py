"""A page of HTML as a tree of elements, whose tags have to match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = frozenset(("input", "meta", "br", "wbr"))


@dataclass
class Element:
    """An element with its attributes, its children and its text."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list["Element"])
    pieces: list[str] = field(default_factory=list[str])

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """All elements below with this tag ("*": any) and these attributes, in order. `_` in a name stands for `-`."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            one
            for one in self.below()
            if tag in ("*", one.tag) and all(one.attributes.get(name) == value for name, value in wanted.items())
        ]

    def one(self, tag: str, **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found

    def below(self) -> Iterator[Element]:
        for child in self.children:
            yield child
            yield from child.below()

    @property
    def text(self) -> str:
        """All text in the element, in order."""
        return "".join(self.pieces)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        assert len(element.attributes) == len(attrs), f"an attribute twice: {attrs}"
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.pieces.append(data)


def parsed(page: str) -> Element:
    """The tree of a page. Raises AssertionError if an element is not closed or not opened."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    (root,) = parser.open
    return root


def table_cells(table: Element) -> list[list[Element]]:
    """The cells of a table's body and foot, line by line."""
    rows = [row for part in ("tbody", "tfoot") for body in table.all(part) for row in body.all("tr")]
    return [[cell for cell in row.children if cell.tag in ("th", "td")] for row in rows]


def exact(cell: Element) -> int:
    """The exact bytes of the size in a cell."""
    return int(cell.one("data").attributes["value"])

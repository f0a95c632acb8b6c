"""python docs/check_site.py SITE: exits with 1 if a page of the built site loads anything from another host."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "video": "src"}
"""Tags that a browser follows by itself, with the attribute that says where to."""
HARMLESS = {"canonical", "next", "prev", "author", "license"}
"""Kinds of <link> that are not loaded."""


class Loads(HTMLParser):
    """Collects what a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag whose target is another host."""
        given = dict(attrs)
        target = given.get(LOADS.get(tag, "")) or ""
        if target.startswith(("http:", "https:", "//")) and given.get("rel") not in HARMLESS:
            self.outside.append(target)


def outside(html: str) -> list[str]:
    """What a page loads from other hosts."""
    page = Loads()
    page.feed(html)
    return page.outside


def main(site: Path) -> int:
    """Print what is loaded from elsewhere, page by page; 1 if there is any, or if there are no pages."""
    pages = sorted(site.rglob("*.html"))
    found = [(page, target) for page in pages for target in outside(page.read_text(encoding="utf-8"))]
    found += [(page, "@import") for page in site.rglob("*.css") if "url(http" in page.read_text(encoding="utf-8")]
    for page, target in found:
        print(f"{page.relative_to(site)} loads {target}")
    if not pages:
        print(f"{site}: no pages")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

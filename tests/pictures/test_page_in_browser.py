"""The page in headless Chromium: no errors, no requests, the keyboard, narrow and dark, contrast.

Skipped without playwright (the extra `browser`) or a Chromium, unless MEMCALC_BROWSER=required.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import memcalc
from memcalc.pictures.html.page import page
from memcalc.pictures.timeline import Timeline, timeline_of
from memcalc.units import show_bytes

REQUIRED: Final = os.environ.get("MEMCALC_BROWSER") == "required"
PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM: Final = next((path for path in map(shutil.which, PROGRAMS) if path), None)

try:
    from playwright.sync_api import Browser, Page, sync_playwright
except ImportError:
    if REQUIRED:
        raise
    pytest.skip("playwright is not installed (extra: browser)", allow_module_level=True)
if PROGRAM is None:
    if REQUIRED:
        raise RuntimeError(f"MEMCALC_BROWSER=required, and none of these is here: {', '.join(PROGRAMS)}")
    pytest.skip("no Chromium", allow_module_level=True)

SETUPS: dict[str, dict[str, Any]] = {
    "zero3": {"model": "llama-7b", "zero": 3, "gpus": 8, "gpu": "a100-40gb"},
    "stages": {
        "model": "llama-7b", "engine": "megatron", "tp": 2, "pp": 4, "gpus": 16, "schedule": "interleaved",
        "virtual_stages": 2, "global_batch_size": 32,
    },
    "experts": {"model": "mixtral-8x7b", "gpus": 16, "ep": 8, "zero": 1},
    "large": {
        "model": "llama-3.1-405b", "gpus": 256, "tp": 8, "pp": 16, "global_batch_size": 256, "gpu": "h100-80gb",
    },
    "too-large": {"model": "llama-7b", "gpu": "rtx4090"},
    "states": {"params": "7B", "zero": 2, "gpus": 8, "gpu": "a100-80gb"},
}  # fmt: skip
ALL = pytest.mark.parametrize("name", SETUPS)
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page of every setup."""
    folder = tmp_path_factory.mktemp("pages")
    for name, options in SETUPS.items():
        (folder / f"{name}.html").write_text(page(memcalc.estimate(**options)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        running.close()


class Opened:
    """An open page, with what it asked for and complained about."""

    def __init__(self, browser: Browser, file: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.troubles: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url, file))
        self.page.goto(file.as_uri())

    def _asked(self, url: str, file: Path) -> None:
        if url.split("#")[0] != file.as_uri():
            self.troubles.append(f"asked for {url}")

    def __enter__(self) -> Page:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert self.troubles == []


def opened(browser: Browser, folder: Path, name: str, *, width: int = 1200, **options: Any) -> Opened:
    return Opened(browser, folder / f"{name}.html", viewport={"width": width, "height": 900}, **options)


@ALL
@SCHEMES
@pytest.mark.parametrize("width", [360, 768, 1200, 2200])
def test_it_is_as_wide_as_the_window(browser: Browser, folder: Path, name: str, scheme: str, width: int) -> None:
    with opened(browser, folder, name, width=width, color_scheme=scheme) as shown:
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        outside = shown.evaluate("""() => Array.from(document.querySelectorAll('main *, header *'), (one) => {
            if (one.closest('.scroll') || one.closest('svg')) return null;
            const box = one.getBoundingClientRect();
            return box.width && (box.right > innerWidth + 1 || box.left < -1) ? one.outerHTML.slice(0, 120) : null;
        }).filter(Boolean)""")
        assert outside == []


def test_without_a_script_all_is_there(browser: Browser, folder: Path) -> None:
    with opened(browser, folder, "zero3", java_script_enabled=False) as shown:
        assert shown.locator("#memory-rows tbody tr").count() > 50
        assert shown.locator("#step-alive tbody tr").count() == 16
        assert shown.locator(".areas path").first.is_visible()
        assert not shown.locator(".search").first.is_visible()
        assert not shown.locator(".controls").is_visible()


# --- tables


def column(shown: Page, number: int) -> list[str]:
    return shown.locator(f"#memory-rows tbody tr:not([hidden]) > *:nth-child({number})").all_text_contents()


def test_sorting_by_the_keyboard(browser: Browser, folder: Path) -> None:
    with opened(browser, folder, "zero3") as shown:
        heading = shown.locator("#memory-rows thead th").nth(2)
        before = column(shown, 1)
        heading.locator("button").focus()
        shown.keyboard.press("Enter")
        assert heading.get_attribute("aria-sort") == "descending"
        values = shown.locator("#memory-rows tbody tr td:nth-child(3)").evaluate_all(
            "all => all.map(one => +one.dataset.n)"
        )
        assert values == sorted(values, reverse=True)
        shown.keyboard.press("Space")
        assert heading.get_attribute("aria-sort") == "ascending"
        values = shown.locator("#memory-rows tbody tr td:nth-child(3)").evaluate_all(
            "all => all.map(one => +one.dataset.n)"
        )
        assert values == sorted(values)
        shown.keyboard.press("Shift+Tab")
        shown.keyboard.press("Shift+Tab")
        shown.keyboard.press("Enter")
        assert shown.locator("#memory-rows thead th[aria-sort]").count() == 1
        assert shown.locator("#memory-rows thead th").first.get_attribute("aria-sort") == "ascending"
        assert sorted(column(shown, 1)) == sorted(before) != before


def test_searching_by_the_keyboard(browser: Browser, folder: Path) -> None:
    with opened(browser, folder, "zero3") as shown:
        rows = len(column(shown, 1))
        shown.locator("#memory-rows-search").focus()
        shown.keyboard.type("MLP gradients")
        found = shown.locator("#memory-rows tbody tr:not([hidden])").all_text_contents()
        assert 0 < len(found) < rows
        assert all("mlp" in row.lower() and "gradients" in row for row in found)
        assert shown.locator(".search output").first.text_content() == f"{len(found)} of {rows} rows"
        shown.keyboard.type(" no such row")
        assert column(shown, 1) == []
        shown.keyboard.press("Control+a")
        shown.keyboard.press("Delete")
        assert len(column(shown, 1)) == rows
        assert shown.locator(".search output").first.text_content() == ""


def test_thousands_of_rows(browser: Browser, tmp_path: Path) -> None:
    report = memcalc.estimate("gpt2")
    report.items = [item._replace(name=f"{item.name} {i}") for i in range(50) for item in report.items]  # type: ignore[misc]
    (tmp_path / "page.html").write_text(page(report), encoding="utf-8")
    with opened(browser, tmp_path, "page") as shown:
        shown.locator("#memory-rows thead button").nth(2).click()
        values = shown.locator("#memory-rows tbody tr td:nth-child(3)").evaluate_all(
            "all => all.map(one => +one.dataset.n)"
        )
        assert values == sorted(values, reverse=True)
        assert len(values) > 2000
        shown.locator("#memory-rows-search").fill("weight 49")
        assert 0 < len(column(shown, 1)) < 100


# --- timeline


def timeline(name: str) -> Timeline:
    return timeline_of(memcalc.estimate(**SETUPS[name]))


def total(shown: Page) -> int:
    return int(shown.locator("#step-alive tfoot data").get_attribute("value") or 0)


def moment(shown: Page) -> int:
    found = re.search(r"moment (\d+)", shown.locator("#step-words").text_content() or "")
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("name", ["zero3", "stages", "too-large"])
def test_the_cursor_by_the_keyboard(browser: Browser, folder: Path, name: str) -> None:
    made = timeline(name)
    totals = made.allocated()
    with opened(browser, folder, name) as shown:
        plot = shown.get_by_role("slider")
        plot.focus()
        assert total(shown) == made.peak
        assert moment(shown) == made.peak_event
        most = int(plot.get_attribute("aria-valuemax") or 0)
        seen: list[int] = []
        for key in (
            "ArrowRight",
            "ArrowRight",
            "ArrowLeft",
            "PageUp",
            "PageDown",
            "Home",
            "ArrowLeft",
            "End",
            "ArrowUp",
            "p",
        ):
            shown.keyboard.press(key)
            seen.append(int(plot.get_attribute("aria-valuenow") or -1))
            assert total(shown) == totals[moment(shown)]
            assert plot.get_attribute("aria-valuetext") == shown.locator("#step-words").text_content()
            assert (plot.get_attribute("aria-valuetext") or "").startswith(show_bytes(total(shown)))
            parts = shown.locator(".at-cursor data").evaluate_all("all => all.map(one => +one.value)")
            assert sum(parts) == total(shown)
        peak = seen[-1]
        far = max(1, round((most + 1) / 20))
        near = [peak + 1, peak + 2, peak + 1, peak + 1 + far, peak + 1]
        assert seen == [*(min(max(one, 0), most) for one in near), 0, 0, most, most, peak]
        assert shown.locator("#step-alive caption").text_content() == "Alive at the peak"


def test_the_cursor_follows_the_mouse_and_the_buttons(browser: Browser, folder: Path) -> None:
    with opened(browser, folder, "zero3") as shown:
        plot = shown.get_by_role("slider")
        box = plot.bounding_box()
        assert box is not None
        plot.hover(position={"x": 1, "y": 50})
        assert moment(shown) < 20
        plot.hover(position={"x": box["width"] - 1, "y": 50})
        first = moment(shown)
        assert first > 8000  # near the last of some 8,900 moments
        shown.get_by_role("button", name="before").click()
        assert moment(shown) < first
        shown.get_by_role("button", name="to the peak").click()
        assert "the peak" in (shown.locator("#step-words").text_content() or "")


def test_everything_is_reached_by_the_tab_key(browser: Browser, folder: Path) -> None:
    with opened(browser, folder, "stages") as shown:
        reached: list[str] = []
        for _ in range(120):
            shown.keyboard.press("Tab")
            reached.append(
                shown.evaluate("""() => {
                    const one = document.activeElement;
                    const style = getComputedStyle(one);
                    return one === document.body ? '' : [
                        one.tagName, one.id, one.className, one.textContent.slice(0, 20), style.outlineStyle, style.outlineWidth
                    ].join('|');
                }""")
            )
        reached = [one for one in reached if one]
        assert all(one.endswith("|solid|3px") for one in reached)
        for word in (
            "A||skip",
            "DIV|step-plot",
            "INPUT|memory-rows-search",
            "BUTTON|||to the peak",
            "INPUT|collective-rows-search",
        ):
            assert any(one.startswith(word) for one in reached), word
        assert sum(one.startswith("DIV||scroll") for one in reached) >= 7


# --- colours


@ALL
def test_the_dark_scheme_is_dark(browser: Browser, folder: Path, name: str) -> None:
    lightness: dict[str, float] = {}
    for scheme in ("light", "dark"):
        with opened(browser, folder, name, color_scheme=scheme) as shown:
            lightness[scheme] = luminance(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert lightness["light"] > 0.9
    assert lightness["dark"] < 0.02


def luminance(colour: str) -> float:
    """The relative luminance of "rgb(1, 2, 3)" (WCAG 2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXTS = """() => {
  const found = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const opaque = (one) => {
    while (one) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$|transparent/.test(colour)) return colour;
      one = one.parentElement;
    }
    return getComputedStyle(document.documentElement).backgroundColor;
  };
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || one.closest('svg, script, style') || !one.getClientRects().length) continue;
    const style = getComputedStyle(one);
    found.set([style.color, opaque(one)].join(';'), one.outerHTML.slice(0, 100));
  }
  return Array.from(found);
}"""
ON_CELLS = """() => Array.from(document.querySelectorAll('.lanes g > path[class^=cell], .band svg rect'), (cell) => {
  const text = cell.matches('rect') ? cell.nextElementSibling : cell.nextElementSibling.querySelector('text');
  return text ? [getComputedStyle(cell).fill, getComputedStyle(text).fill] : null;
}).filter(Boolean)"""
COMPONENTS = (
    """() => Array.from(document.querySelectorAll('.patterns pattern rect'), (one) => getComputedStyle(one).fill)"""
)


@ALL
@SCHEMES
def test_texts_stand_out(browser: Browser, folder: Path, name: str, scheme: str) -> None:
    """4.5 is WCAG's AA for texts, and 3 for what pictures are made of."""
    with opened(browser, folder, name, color_scheme=scheme) as shown:
        low = [(colours, where) for colours, where in shown.evaluate(TEXTS) if contrast(*colours.split(";")) < 4.5]
        assert low == []
        assert [pair for pair in shown.evaluate(ON_CELLS) if contrast(*pair) < 4.5] == []
        back = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert [fill for fill in shown.evaluate(COMPONENTS) if contrast(fill, back) < 3] == []


def test_components_differ_without_colour(browser: Browser, folder: Path) -> None:
    with opened(browser, folder, "zero3") as shown:
        marks = shown.evaluate(
            "() => Array.from(document.querySelectorAll('.patterns pattern'), "
            "(one) => one.querySelector('path')?.getAttribute('d'))"
        )
        assert len(set(marks)) == len(marks) >= 9


@pytest.mark.parametrize("name", ["zero3", "stages", "large"])
def test_on_paper_all_is_shown(browser: Browser, folder: Path, name: str) -> None:
    """With a width of 19 cm, dark on white, without what needs a script."""
    with opened(browser, folder, name, width=718, color_scheme="dark") as shown:
        shown.emulate_media(media="print")
        assert not shown.locator("nav").is_visible()
        assert not shown.locator(".search").first.is_visible()
        assert luminance(shown.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.9
        assert luminance(shown.evaluate("getComputedStyle(document.body).color")) < 0.1
        cut = shown.evaluate("""() => Array.from(document.querySelectorAll('.scroll'), (box) => {
            const inner = box.firstElementChild.getBoundingClientRect(), outer = box.getBoundingClientRect();
            const fits = inner.bottom <= outer.bottom + 1 && inner.right <= innerWidth;
            return fits ? null : [box.getAttribute('aria-label'), inner.right, innerWidth];
        }).filter(Boolean)""")
        assert cut == []

"""The pages: how long their lines are, where their links go, which files they name, and that two languages say the same."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

import memcalc

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
WIDEST = 130
FILE = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|json|md|yml))`")
OURS = ("memcalc/", "tests/", "docs/", "benchmarks/", "model_specs/")

each = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())


def prose(text: str) -> Iterator[str]:
    """The lines that are no table and in no fenced block."""
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith(("|", "```")):
            yield line


def columns(line: str) -> int:
    """The width of a line; a Chinese character is two columns wide."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown and GitHub make them of words, digits and hyphens."""
    headings = [line.lstrip("#").strip().lower() for line in prose(text) if line.startswith("#")]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in headings}


@each
def test_lines_of_prose_are_not_wider_than_a_screen(page: Path) -> None:
    wide = [line for line in prose(page.read_text(encoding="utf-8")) if columns(line) > WIDEST]
    assert not wide


@each
def test_links_between_pages_have_a_target(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_file(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), f"{page.name}: {target}"


@each
def test_files_of_this_repository_that_are_named_exist(page: Path) -> None:
    for name in FILE.findall(page.read_text(encoding="utf-8")):
        if name.startswith(OURS) and "NAME" not in name and "TYPE" not in name:
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_a_link_without_a_target_is_found(tmp_path: Path) -> None:
    assert LINK.findall("[a](b.md#c) `[x](y)`")[0] == "b.md#c"
    assert anchors("# When a higher stage needs more\n```\n# no\n```\n") == {"when-a-higher-stage-needs-more"}
    assert list(prose("a\n```\nb\n```\n| c |\n")) == ["a"]


def test_every_page_of_the_site_is_in_its_menu() -> None:
    menu = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert menu == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


# --- the READMEs


def readme(name: str = "README.md") -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_a_readme_is_read_in_three_minutes(name: str) -> None:
    """The output of a command is as long as the command makes it."""
    text = readme(name)
    outputs = sum(len(block.splitlines()) for block in blocks(text, "text"))
    assert len(text.splitlines()) - outputs <= 95


def test_the_gate_finds_the_two_commands_that_install() -> None:
    installs = [line for line in readme().splitlines() if line.startswith("pip install ")]
    assert installs == [
        "pip install . && memcalc estimate --model llama-7b --zero 3 --gpus 8",
        'pip install ".[test]" && pytest -n auto',
    ]


def blocks(text: str, kind: str) -> list[str]:
    """The fenced blocks of a kind, without comments."""
    found = re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+#.*", "", block) for block in found]


def test_the_readmes_python_prints_what_its_comment_says(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```", readme(), re.DOTALL | re.MULTILINE)
    (said,) = re.findall(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)
    exec(source, {})
    assert capsys.readouterr().out == f"{said}\n"


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_what_a_readme_says_of_its_first_output_is_in_it(name: str) -> None:
    text = readme(name)
    output = blocks(text, "text")[0]
    explained = text.partition("<!-- end of output -->")[2].partition("\n\n")[0]
    for said in (r"\d+ ms to \d+ ms", r"36\.20 GiB"):
        (found,) = re.findall(said, explained)
        assert found in output
    (rule,) = re.findall(r"(12\.55) GiB", explained)
    assert float(rule) == round(16 * memcalc.load_model("llama-7b").num_parameters / 8 / 2**30, 2)


@pytest.mark.parametrize("kind", ["sh", "python", "text"])
def test_both_languages_have_the_same_commands_and_outputs(kind: str) -> None:
    assert blocks(readme(), kind)
    assert blocks(readme("README.zh.md"), kind) == blocks(readme(), kind)


def test_both_languages_have_the_same_links_and_numbers() -> None:
    """The evidence is a table in both; a sentence has the same numbers in any order."""
    english, chinese = readme(), readme("README.zh.md")
    assert [link for link in LINK.findall(english) if link.startswith("docs/")] == [
        link for link in LINK.findall(chinese) if link.startswith("docs/")
    ]
    numbers = [
        sorted(re.findall(r"\d(?:[\d.,]*\d)?", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
        for text in (english, chinese)
    ]
    assert numbers[0] == numbers[1]

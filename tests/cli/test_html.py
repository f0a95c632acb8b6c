"""`memcalc estimate --html`: the page beside the report, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import LLAMA, check_refused, here, program
from page_tree import parsed

import memcalc
from memcalc.cli.html_page import write_page

SETUP = ("estimate", "gpt2", "--gpus", "2")


def test_the_page_and_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    alone, both = here(capsys, *SETUP), here(capsys, *SETUP, "--html", str(file))
    assert both == alone
    assert parsed(file.read_text(encoding="utf-8")).one("h1").text == "gpt2"


@pytest.mark.parametrize(
    "more", [("--json",), ("--format", "csv"), ("--rows", "--verbose"), ("--check", "--gpu", "80GB")]
)
def test_with_other_formats(more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    ran = here(capsys, *SETUP, *more, "--html", str(file))
    assert ran == here(capsys, *SETUP, *more)
    assert (ran.status, ran.stderr) == (0, "")
    assert file.exists()


def test_with_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, output = tmp_path / "page.html", tmp_path / "report.json"
    ran = here(capsys, *SETUP, "--html", str(page), "--output", str(output))
    assert ran == (0, "", "")
    assert json.loads(output.read_text())["schema_version"] == 1
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_one_that_does_not_fit_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    ran = here(capsys, "estimate", "llama-7b", "--gpu", "rtx4090", "--check", "--html", str(file))
    assert ran.status == 1
    assert "does not fit" in parsed(file.read_text()).one("header").text


def test_a_size_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    assert here(capsys, "estimate", "--params", "7B", "--html", str(file)).status == 0
    assert "model states only" in parsed(file.read_text()).one("header").text


@pytest.mark.parametrize("html", ["-", ""])
def test_what_is_no_file(html: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, *SETUP, "--html", html), "--html", "name of a file")


def test_one_file_for_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").symlink_to(tmp_path / "report.md")
    for html in ("report.md", "./report.md", "other"):
        ran = here(capsys, *SETUP, "--html", str(tmp_path / html), "-o", str(tmp_path / "report.md"))
        check_refused(ran, "--html", "--output")
    check_refused(here(capsys, *SETUP, "--html", "a.json", "--trace", "./a.json"), "--html", "--trace")
    assert not (tmp_path / "report.md").exists()


def test_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for html in (tmp_path, tmp_path / "none" / "page.html", "a" * 300, "a\0b"):
        check_refused(here(capsys, *SETUP, "--html", str(html)), "--html", "cannot be written")


def test_a_full_disk() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    check_refused(program(*SETUP, "--html", "/dev/full"), "--html /dev/full", "cannot be written")


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """As Python reads the bytes of a file's name that are not UTF-8."""
    model = memcalc.load_model(LLAMA)
    model.name = "mod\udcffel"
    write_page(memcalc.estimate(model), tmp_path / "page.html")
    assert parsed((tmp_path / "page.html").read_text(encoding="utf-8")).one("h1").text == "mod?el"

"""A built page that loads something from another host is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_site import main, outside


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', True),
        ('<img src="http://x.example/a.png">', True),
        ('<a href="https://example.org">link</a>', False),
        ('<link rel="canonical" href="https://example.org/">', False),
        ('<script src="assets/x.js"></script>', False),
    ],
)
def test_outside(html: str, loads: bool) -> None:
    assert bool(outside(html)) is loads


def test_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path) == 1
    (tmp_path / "a.html").write_text("<p>", encoding="utf-8")
    assert main(tmp_path) == 0
    (tmp_path / "b.html").write_text('<script src="https://x.example/a.js">', encoding="utf-8")
    assert main(tmp_path) == 1
    assert "b.html loads https://x.example/a.js" in capsys.readouterr().out

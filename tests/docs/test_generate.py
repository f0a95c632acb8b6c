"""The documents in the repository are those that docs/generate.py writes."""

from __future__ import annotations

import generate
import pytest


@pytest.mark.slow
def test_no_document_is_stale(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.run(check=True) == 0, capsys.readouterr().out


def test_every_command_has_a_section() -> None:
    page = generate.options()
    for name in generate.COMMANDS:
        assert f"## memcalc {name}\n" in page


def test_a_stale_document_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(generate, "documents", lambda: {generate.ROOT / "LICENSE": "another text"})
    assert generate.run(check=True) == 1
    assert capsys.readouterr().out == "LICENSE is stale: run python docs/generate.py\n"

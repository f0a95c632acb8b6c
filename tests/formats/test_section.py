"""Values of a file by name, each with the type that its tool wants."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc import InputError
from memcalc.formats.section import Section


def section(**content: Any) -> Section:
    return Section("--deepspeed", "ds.json", content, "zero_optimization.")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("whole", 3, 3),
        ("whole", 5e8, 500_000_000),
        ("whole", "5e7", 50_000_000),
        ("whole", " 12 ", 12),
        ("whole", None, None),
        ("number", 0.5, 0.5),
        ("number", "1e-3", 0.001),
        ("number", 2**60 + 1, 2**60 + 1),
        ("flag", True, True),
        ("flag", "true", True),
        ("flag", "NO", False),
        ("flag", 0, False),
        ("flag", None, None),
        ("text", "x", "x"),
        ("words", "a, b,", ("a", "b")),
        ("words", ["a", "b"], ("a", "b")),
        ("words", [], ()),
    ],
)
def test_values(kind: str, value: object, expected: object) -> None:
    found = getattr(section(a=value), kind)("a")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("whole", 1.5),
        ("whole", -1),
        ("whole", 10**16),
        ("whole", True),
        ("whole", "x"),
        ("whole", [1]),
        ("whole", float("inf")),
        ("number", float("nan")),
        ("number", "inf"),
        ("number", {}),
        ("flag", "maybe"),
        ("flag", 2),
        ("flag", [True]),
        ("text", 3),
        ("words", 3),
        ("words", [1]),
        ("section", 3),
        ("section", "x"),
    ],
)
def test_wrong_values_name_the_file_the_key_and_the_value(kind: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        getattr(section(a=value), kind)("a")
    assert str(caught.value).startswith(f"--deepspeed ds.json: zero_optimization.a {value!r}: allowed: ")


def test_choices_in_any_case_are_as_allowed() -> None:
    one = section(a=" Cpu ", b="gpu")
    assert one.choice("a", ("none", "cpu")) == "cpu"
    assert one.choice("c", ("none", "cpu")) is None
    with pytest.raises(InputError, match=r"allowed: none, cpu$"):
        one.choice("b", ("none", "cpu"))


def test_a_key_by_its_old_names() -> None:
    assert section(old=1).first("new", "old") == "old"
    assert section(old=None, new=2).first("new", "old") == "new"
    assert section().first("new", "old") == "new"


def test_what_was_not_read_is_known() -> None:
    one = section(a=1, b={"c": 1}, d=2)
    one.whole("a")
    one.ignore("d")
    assert one.left() == ["zero_optimization.b"]
    assert one.section("b").left() == ["zero_optimization.b.c"]
    with pytest.raises(
        InputError, match=r"^--deepspeed ds.json: zero_optimization.stge: unknown key; did you mean stage\?"
    ):
        section(stge=1).refuse_unknown(["stage"])


def test_places_are_for_people() -> None:
    assert section().value("a", 1) == (1, "ds.json: zero_optimization.a", True)
    assert section().default("a", 1) == (1, "ds.json: zero_optimization.a, its default", False)
    assert Section("--deepspeed", "", {}).where("a") == "--deepspeed: a"

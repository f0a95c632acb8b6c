"""The first problem that pydantic finds in a configuration, in one plain line."""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError

from memcalc.errors import quoted


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a validation as "field `x` is v; should be ..."."""
    problem = error.errors(include_url=False)[0]
    loc = [str(part) for part in problem["loc"]]
    said = problem["msg"].replace("Input should", "it should")
    if "constrained-int" in loc:  # a number or a list of numbers: pydantic names the one that it tried first
        loc = loc[: loc.index("constrained-int")]
        said = f"{_PLAIN.get(problem['type'], said)}, or a list of such numbers"
        bounds: dict[str, Any] = problem.get("ctx", {})
        said = said.format(bounds.get("ge"))
    field = ".".join(loc)
    given = "missing" if problem["type"] == "missing" else quoted(problem["input"])
    return f"field `{field}` is {given}; {said}"


_PLAIN: Final = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "it should be a whole number"),
    "greater_than_equal": "it should be a whole number from {} up",
}
"""Messages about numbers, in plain words."""

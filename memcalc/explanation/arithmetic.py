"""Values of formulas as people write them, such as `4·Φ + 12·Φ/n`, with numbers for the names."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

_NAME: Final = re.compile(r"[A-Za-zΑ-ωΦ_][A-Za-z0-9Α-ωΦ_]*")
_OPERATORS: Final[dict[type, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: Fraction.__truediv__,
}


def evaluated(formula: str, numbers: Mapping[str, int | float] | None = None) -> Fraction:
    """Return the exact value of a formula of + - · / and ², with numbers for its names. KeyError for a name without one."""
    return _value(
        ast.parse(with_numbers(formula, numbers or {}).replace("·", "*").replace("²", "**2"), mode="eval").body
    )


def with_numbers(formula: str, numbers: Mapping[str, int | float]) -> str:
    """Return the formula with a number in the place of every name. Raise KeyError for a name without a number."""
    return _NAME.sub(lambda name: _written(numbers[name[0]]), formula)


def _written(number: int | float) -> str:
    whole = int(number)
    return str(whole) if whole == number else repr(float(number))


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    assert isinstance(node, ast.BinOp), ast.dump(node)
    if isinstance(node.op, ast.Pow):
        return _value(node.left) ** int(_value(node.right))
    return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))

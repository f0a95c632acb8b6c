"""Every attribute that transformers' configuration class computes or its model reads, given in the file with another value:
memcalc has transformers' parameters, or refuses in one line. The attributes are found in transformers' own source."""

from __future__ import annotations

import ast
import inspect
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from cases import step_cases
from meta_models import Shapes, model_of, tried
from records import on_record

from memcalc import load_model
from memcalc.errors import InputError
from memcalc.families import FAMILIES

if TYPE_CHECKING:
    from types import ModuleType

ANY_TYPE = {
    "architectures", "attn_implementation", "_attn_implementation", "dtype", "is_heterogeneous", "model_type",
    "output_attentions", "output_hidden_states", "per_layer_attributes", "return_dict", "torch_dtype", "use_return_dict",
    "bos_token_id", "eos_token_id",
}  # fmt: skip
"""What a configuration of any type has, and no type computes or builds weights with."""

STAYS_UNREAD = ("text_config", "out_indices", "out_features", "mlp_multipliers", "ssm_multipliers")
"""What no program reads and transformers checks all the same: a number in the place of an object, one too few of a list."""


@cache
def attributes_in(module: ModuleType) -> set[str]:
    """Attributes of a configuration that a module's source reads or sets, by name."""
    own = {"self"} if "configuration_" in module.__name__ else set[str]()
    found: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"config", "self.config"} | own:
            found.add(node.attr)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("getattr", "hasattr") or called.startswith("kwargs."):
                found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return {name for name in found if name.isidentifier()}


def candidates(model: Any) -> set[str]:
    """Those of the model's own classes and of its configuration's."""
    classes = {cls for part in model.modules() for cls in type(part).__mro__} | {*type(model.config).__mro__}
    own = {cls for cls in classes if cls.__module__.startswith("transformers.models.")}
    found = set[str]().union(*(attributes_in(inspect.getmodule(cls)) for cls in own))  # type: ignore[arg-type]
    return {name for name in found - ANY_TYPE if not callable(getattr(type(model.config), name, None))}


def others(value: Any) -> list[Any]:
    """Values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 8, max(value // 2, 1)]
    if isinstance(value, float):
        return [value / 2 or 0.5]
    if isinstance(value, str):
        return [act for act in ("relu", "silu") if act != value] if value in ("relu", "silu", "gelu") else []
    if isinstance(value, list | tuple) and value and all(isinstance(one, int) for one in value):
        return [[2 * one for one in value]]
    return [16] if value is None else []


@on_record
def changes(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every attribute with each of its other values."""
    model = model_of(fields)
    names = sorted(candidates(model))
    return [(name, value) for name in names for value in others(getattr(model.config, name, None))]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_attribute_that_is_given_is_read_as_transformers_reads_it(family: str) -> None:
    base = step_cases(family)[0].fields
    wrong: list[str] = []
    for name, value in changes(base):
        fields = {**base, name: value}
        try:
            ours: Shapes = [(name, shape) for name, shape, _ in load_model(deepcopy(fields)).weights()]
        except InputError as error:
            assert "\n" not in str(error)
            continue
        theirs = tried(fields)
        unread = theirs.raised and (name in STAYS_UNREAD or "Validation" in theirs.raised)
        if ours != theirs.parameters and not unread:
            wrong.append(f"{name}: {value}, {theirs.raised}")
    assert wrong == []

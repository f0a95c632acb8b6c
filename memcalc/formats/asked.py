"""The options that files and the command line ask for together, for checks that come before the setup is resolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memcalc.errors import InputError
from memcalc.inputs.options import Options, check_options

if TYPE_CHECKING:
    from memcalc.formats.found import Value


def asked_options(given: Mapping[str, Any], said: Mapping[str, Value]) -> Options | None:
    """Return the options that are given, and what files say of others; None if a value is not allowed, which is refused where
    the setup is resolved."""
    values = {name: value.value for name, value in said.items()} | dict(given)
    try:
        return check_options({name: value for name, value in values.items() if name in Options._fields})
    except InputError:
        return None

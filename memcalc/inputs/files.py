"""Reading of the JSON files that ship with memcalc, and of those that a user names."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, cast

from memcalc.errors import InputError, one_line
from memcalc.inputs.bounded import CONFIG, TooLarge, read_bounded


@cache
def specs_folder() -> Path:
    """Return the folder of the bundled model specs: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "model_specs"
    return inside if inside.is_dir() else package.parent / "model_specs"


def hardware_folder() -> Path:
    """Return the folder of the bundled GPU files."""
    return Path(__file__).resolve().parent.parent / "hardware" / "gpus"


def read_bundled(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that ships with memcalc."""
    return json.loads(path.read_bytes())


def read_json_object(path: Path, option: str, expected: str = "a config.json", most: int = CONFIG) -> dict[str, Any]:
    """Return the content of a user's JSON file. Raises InputError if it cannot be read, has more than `most` bytes or
    is not one JSON object."""
    content: object
    try:
        content = json.loads(read_bounded(path, most))
    except TooLarge as error:
        raise InputError(f"{option} {one_line(path)}: {error}; expected {expected}") from None
    except OSError as error:
        raise InputError(f"{option} {one_line(path)}: cannot be read ({error.strerror}); expected {expected}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{option} {one_line(path)}: not valid JSON ({one_line(error)}); expected {expected}"
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{option} {one_line(path)}: holds a JSON {type(content).__name__}; expected one object")
    return cast("dict[str, Any]", content)

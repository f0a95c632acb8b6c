"""The options that a setup is given by, completed by the files among them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from memcalc.errors import InputError
from memcalc.inputs.file_options import FILES, FromFiles

_FILES: Final = frozenset(FILES)


def with_files(model: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any], FromFiles | None]:
    """Return the model and the options with what the given files say; options that were given win. None without a file.

    Raises InputError for a file that cannot be read, says what its tool does not take, or contradicts another one.
    """
    if _FILES.isdisjoint(options):
        return model, options, None
    if all(options.get(name) is None for name in FILES):
        return model, {name: value for name, value in options.items() if name not in FILES}, None
    from memcalc.formats.merged import merged

    if options.get("gpu") is None and any(options.get(name) is not None for name in FILES if name != "layers"):
        options = {**options, **_gpu_of_this_machine()}  # first, as some kernels ask for a newer GPU
    return merged(model, options)


@contextmanager
def naming_files(files: FromFiles | None) -> Generator[None]:
    """Let a refusal of an option inside say the file and the key that the option's value came from."""
    try:
        yield
    except InputError as error:
        where = None if files is None else files.origins.get(_option_of(str(error)))
        if where is None:
            raise
        raise InputError(f"{error} (from {where})") from None


def _option_of(line: str) -> str:
    """Return the Python name of the option that a refusal begins with: "--gpu x: ..."."""
    return line.split(" ", 1)[0].removeprefix("--").rstrip(":").replace("-", "_")


def _gpu_of_this_machine() -> dict[str, Any]:
    """Return the GPU of this machine as an option, as whoever has a job's file wants to know whether it runs here; nothing
    where there is none."""
    from memcalc.inputs.local_gpu import local_gpu

    try:
        return {"gpu": local_gpu()}
    except InputError:
        return {}

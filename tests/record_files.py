"""The files of `tests/records/`, and the packages that they were made with."""

from __future__ import annotations

import contextlib
import gzip
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

FOLDER = Path(__file__).resolve().parent / "records"
PACKAGES = {
    "torch": "validate", "transformers": "validate", "deepspeed": "oracles", "megatron-core": "oracles",
    "transformer-engine": "oracles", "bitsandbytes": "oracles", "lion-pytorch": "oracles",
    "peft": "oracles", "trl": "preference", "liger-kernel": "kernels", "flash-attn": "flash",
    "apollo-torch": "optimizers", "galore-torch": "optimizers",
}  # fmt: skip
"""What records are made with -> the extra that has it."""
BESIDE = ("liger-kernel", "flash-attn")
"""Those that are not installed with the others: TRL would look for Liger-Kernel's Triton, and flash-attn is built with CUDA."""
IMPORTED = {name.split("-")[0] if name == "megatron-core" else name.replace("-", "_"): name for name in PACKAGES}
"""The name that a package is imported by -> its own."""
LARGE = 2**20
"""Bytes of a file from which on it is compressed."""


# --- packages


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name).partition("+")[0]
    return found


def other_versions(folder: Path = FOLDER) -> list[str]:
    """Where what is installed is not what the records were made with."""
    recorded = read_versions(folder)
    return [
        f"records are of {name} {recorded[name]}, {version} is installed"
        for name, version in versions().items()
        if name in recorded and recorded[name] != version
    ]


def missing_package(error: BaseException | None) -> str | None:
    """The package of PACKAGES that was not there, if that is why something failed."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            name = (error.name or "").split(".")[0]
            package = name if name in PACKAGES else IMPORTED.get(name)
            if package is not None and package not in versions():
                return package
        error = error.__cause__ or error.__context__
    return None


def skip_for(package: str, error: BaseException) -> NoReturn:
    import pytest

    raise pytest.skip.Exception(f"needs {package}: pip install '.[{PACKAGES[package]}]', then pytest --live") from error


# --- files


def read_versions(folder: Path) -> dict[str, str]:
    path = folder / "versions.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_book(folder: Path, oracle: str) -> dict[str, str]:
    """The calls of an oracle and, as JSON, what it returned: in turn, a line each."""
    plain, packed = folder / f"{oracle}.jsonl", folder / f"{oracle}.jsonl.gz"
    if packed.exists():
        lines = gzip.decompress(packed.read_bytes()).decode().split("\n")[:-1]
    else:
        lines = plain.read_text(encoding="utf-8").split("\n")[:-1] if plain.exists() else []
    return dict(zip(lines[::2], lines[1::2], strict=True))


def write_book(folder: Path, oracle: str, calls: Mapping[str, str]) -> None:
    """All of a file, sorted; none where there are no calls."""
    text = "".join(f"{call}\n{calls[call]}\n" for call in sorted(calls)).encode()
    plain, packed = folder / f"{oracle}.jsonl", folder / f"{oracle}.jsonl.gz"
    plain.unlink(missing_ok=True)
    packed.unlink(missing_ok=True)
    if len(text) >= LARGE:
        packed.write_bytes(gzip.compress(text, mtime=0))
    elif text:
        plain.write_bytes(text)


def write(folder: Path, made: Mapping[str, Mapping[str, str]], *, whole: bool) -> None:
    """What a run with `--record` has made. `whole`: the run asked for all there is, so what it did not ask for goes."""
    kept = {} if whole else {oracle: read_book(folder, oracle) for oracle in made}
    if whole:
        for path in (*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")):
            path.unlink()
    folder.mkdir(exist_ok=True)
    (folder / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")
    for oracle, calls in made.items():
        write_book(folder, oracle, {**kept.get(oracle, {}), **calls})


def oracles_of(folder: Path) -> list[str]:
    return sorted({path.name.partition(".jsonl")[0] for path in folder.glob("*.jsonl*")})

"""One new family, optimizer, engine, GPU or command is one new file: each is added in a folder, and nothing else is said of it
but where the folder is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import PACKAGE, environment

from memcalc.registry import OF_DEEPSPEED, OPTIMIZERS

FILES = {
    "families/new_model.py": '''
from dataclasses import dataclass
from typing import Final

from memcalc.families.base.config import Count
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class NewModelConfig(LlamaConfig):
    hidden_size: Count = 256
    intermediate_size: Count = 512
    num_attention_heads: Count = 4
    num_hidden_layers: Count = 2


class NewModel(Llama):
    Config = NewModelConfig


FAMILY: Final = Family("new-model", NewModel, Support(tensor_parallel=LLAMA))
''',
    "optimizers/new_sgd.py": '''
from typing import Final

from memcalc.optimizers.sgd_momentum import Sgd

OPTIMIZER: Final = Sgd("new-sgd", ("for-loop",), momentum=True)
''',
    "engines/new_engine.py": '''
from memcalc.engines.ddp import collectives, holdings, textbook

__all__ = ["collectives", "holdings", "textbook"]
''',
    "cli/new_command.py": '''
EPILOG = "Examples: memcalc new-command"


def new_command() -> None:
    """Say that the new command has run."""
    print("the new command has run")
''',
}  # fmt: skip
"""By the folder of the package that is extended."""

EXTENDED = """
import sys
from importlib import import_module
from pathlib import Path

from memcalc.inputs import gpu

for name in ("families", "optimizers", "engines", "cli"):
    import_module(f"memcalc.{name}").__path__.append(sys.argv[1] + "/" + name)
gpu.FOLDERS.append(Path(sys.argv[1], "gpus"))

from memcalc.cli.main import main

sys.exit(main(sys.argv[2:]))
"""
"""The command line, with the folder's parts in the search paths."""

NEW = {"model_type": "new-model"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one new file of each kind."""
    made = tmp_path_factory.mktemp("added")
    gpu = json.loads((PACKAGE / "hardware" / "gpus" / "h100-80gb.json").read_text(encoding="utf-8"))
    files = {**FILES, "gpus/new-gpu.json": json.dumps(gpu | {"aliases": [], "full_name": "The new GPU"})}
    for name, text in files.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text, encoding="utf-8")
    return made


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line of an interpreter of its own."""
    command = [sys.executable, "-c", EXTENDED, str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)


def estimate(folder: Path, fields: dict[str, Any], *options: str) -> dict[str, Any]:
    """The document of an estimate of a config.json with these fields."""
    config = folder / f"{fields['model_type']}.json"
    config.write_text(json.dumps(fields), encoding="utf-8")
    done = run(folder, "estimate", "--model", str(config), "--json", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_family(folder: Path) -> None:
    new = estimate(folder, NEW)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    llama = estimate(folder, {"model_type": "llama", **sizes})
    assert new["model"]["model_type"] == "new-model"
    assert new["memory"] == llama["memory"]


def test_what_a_family_can_do(folder: Path) -> None:
    new = estimate(folder, NEW, "--engine", "fsdp2", "--gpus", "2", "--tp", "2")
    assert new["setup"]["tp"] == 2
    assert new["communication"]["per_step"]["payload"] > 0
    refused = run(folder, "estimate", str(folder / "new-model.json"), "--engine", "megatron", "--gpus", "2")
    assert "for a new-model is not modelled by this version" in refused.stderr


def test_an_optimizer(folder: Path) -> None:
    new = estimate(folder, NEW, "--optimizer", "new-sgd")
    assert new["setup"]["optimizer"] == "new-sgd"
    assert new["memory"]["phases"] == estimate(folder, NEW, "--optimizer", "sgd-momentum")["memory"]["phases"]
    assert estimate(folder, NEW, "--optimizer", "new-sgd", "--engine", "fsdp2", "--gpus", "2")["setup"]["zero"] == 3


def test_an_engine(folder: Path) -> None:
    new = estimate(folder, NEW, "--engine", "new-engine", "--gpus", "2")
    assert new["setup"]["engine"] == "new-engine"
    ddp = estimate(folder, NEW, "--engine", "ddp", "--gpus", "2")
    assert (new["memory"], new["communication"]) == (ddp["memory"], ddp["communication"])
    assert new["communication"]["per_step"]["payload"] > 0


def test_a_gpu(folder: Path) -> None:
    new, h100 = (estimate(folder, NEW, "--gpu", name)["fit"] for name in ("new-gpu", "h100-80gb"))
    assert new == h100 | {"gpu": "new-gpu"}
    assert "new-gpu" in run(folder, "gpus").stdout


def test_a_command(folder: Path) -> None:
    assert run(folder, "new-command").stdout == "the new command has run\n"
    assert "Say that the new command has run." in run(folder, "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (
            ["estimate", "gpt2", "--optimizer", "x"],
            f"{', '.join(OPTIMIZERS.known)}, new-sgd, {', '.join(OF_DEEPSPEED)}",
        ),
        (
            ["estimate", "gpt2", "--engine", "x"],
            "none, ddp, fsdp2, deepspeed, megatron, fsdp1, data-parallel, parameter-server, colossalai, new-engine",
        ),
        (["zzz"], "estimate, compare, fit, plan, infer, emit, explain, quiz, validate, models, gpus, new-command"),
    ],
)
def test_new_names_are_listed_behind_the_others(folder: Path, arguments: list[str], listed: str) -> None:
    assert f"allowed: {listed}" in run(folder, *arguments).stderr


def test_new_names_are_in_the_help(folder: Path) -> None:
    shown = " ".join(run(folder, "estimate", "--help-all").stdout.replace("│", " ").split())
    assert f"new-sgd, {', '.join(OF_DEEPSPEED)}. (default: adamw)" in shown
    assert "new-engine. (default: by --gpus and --zero)" in shown


def test_without_the_folder_there_is_none(folder: Path) -> None:
    assert "unknown command" in run(folder / "nowhere", "new-command").stderr

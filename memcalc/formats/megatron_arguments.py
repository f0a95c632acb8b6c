"""Megatron-LM's arguments as a mapping: from a command line, a list, a YAML or JSON mapping, or a launch script.

Source: parse_args of megatron/training/arguments.py (argparse, no abbreviations), and the configurations of
tests/functional_tests/test_cases with their `MODEL_ARGS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from memcalc.errors import InputError, one_line
from memcalc.formats.loading import load, mapping, text_of
from memcalc.formats.megatron_flags import KNOWN, SINGLE, SWITCHES
from memcalc.formats.megatron_shell import Script, read_script, read_words
from memcalc.inputs.cublas import workspace_config
from memcalc.units import MIB

OPTION: Final = "--megatron-args"
UNREAD: Final = "unread"
"""The key of the words that belong to no option. They may be more arguments: `$EXTRA_ARGS`."""
SCRIPT: Final = "training_script"
"""The key of the Python file that the arguments are for."""
NODES: Final = "nnodes"
GPUS_PER_NODE: Final = "nproc_per_node"
WORKSPACES: Final = "cublas_workspace_config"
"""The key of the environment variable that a script or the `ENV_VARS` of a functional test set for the job."""
_LAUNCHER: Final = {
    "nnodes": NODES, "num-nodes": NODES, "nproc-per-node": GPUS_PER_NODE, "num-gpus": GPUS_PER_NODE,
}  # fmt: skip
"""torchrun's and DeepSpeed's options that tell the number of GPUs."""
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")
"""The modules that start other ones."""
_VARIABLES: Final = {
    NODES: ("NNODES", "NUM_NODES", "N_NODES"),
    GPUS_PER_NODE: ("GPUS_PER_NODE", "NPROC_PER_NODE", "NGPUS_PER_NODE", "NUM_GPUS_PER_NODE", "GPU_PER_NODE"),
}
"""The variables of launch scripts that tell it, if the launcher's options do not."""
_SECTIONS: Final = ("MODEL_ARGS", "language_model", "model_parallel")
"""The mappings that hold arguments: of the functional tests, and of `--yaml-cfg`."""
_FLAG: Final = re.compile(r"--[A-Za-z]")
_COMMAND: Final = re.compile(r"\s--[A-Za-z]")
_MODEL_ARGS: Final = re.compile(r"^MODEL_ARGS\s*:", re.MULTILINE)


def arguments_of(source: object) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a file ("" for arguments themselves), and the arguments: {"num_layers": "32", "bf16": True}.

    `source` is a mapping, a list of words, a text or a path. A text with `--` is arguments or a command, another one
    the path of a file. Raises InputError.
    """
    if isinstance(source, Mapping):
        return "", _of_mapping(load(OPTION, cast("Mapping[str, Any]", source))[1], "")
    if isinstance(source, str) and len(source) > MIB:
        raise InputError(f"{OPTION}: is larger than 1 MiB; expected arguments")
    if isinstance(source, str) and (_FLAG.search(source) or not source.strip()):
        return "", _of_text(source, "")
    if isinstance(source, (str, os.PathLike)):
        path = Path(cast("str | os.PathLike[str]", source))
        return path.name, _of_file(path, text_of(OPTION, path))
    if isinstance(source, (list, tuple)):
        return "", _of_words([str(word) for word in cast("list[object]", source)], "")
    raise InputError(f"{OPTION} {one_line(repr(source))}: allowed: arguments as text, list or mapping, or a file")


def _of_file(path: Path, text: str) -> Mapping[str, Any]:
    suffix = path.suffix.lower()
    if suffix in (".json", ".yaml", ".yml", ".toml") or text.lstrip().startswith("{") or _MODEL_ARGS.search(text):
        if suffix not in (".json", ".toml") and not text.lstrip().startswith("{"):
            path = path.with_suffix(".yaml")
        return _of_mapping(mapping(OPTION, path, text), path.name)
    return _of_text(text, path.name)


def _of_mapping(content: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """Return the arguments of a mapping. Sections are taken apart; other tools' sections are left out."""
    out: dict[str, Any] = {}
    if "MODEL_ARGS" in content:
        out = _of_environment(content.get("ENV_VARS"))
        content = {"MODEL_ARGS": content["MODEL_ARGS"]}
    for key, value in content.items():
        if key not in _SECTIONS:
            out[name_of(str(key))] = value
        elif isinstance(value, Mapping):
            out |= {name_of(str(k)): v for k, v in cast("Mapping[Any, Any]", value).items()}
        elif isinstance(value, list):
            out |= _of_words([str(word) for word in cast("list[object]", value)], file)
        elif isinstance(value, str):
            out |= _of_text(value, file)
        elif value is not None:
            raise InputError(f"{_place(file)}: {key} {one_line(repr(value))}: allowed: a mapping of arguments")
    return out


def _of_environment(variables: object) -> dict[str, Any]:
    """Return what a job's environment says: {"cublas_workspace_config": ":4096:8"}, if torch can read it."""
    given: Mapping[str, Any] = cast("Mapping[str, Any]", variables) if isinstance(variables, Mapping) else {}
    config = str(given.get(WORKSPACES.upper(), ""))
    return {WORKSPACES: config} if workspace_config(config) is not None else {}


def name_of(flag: str) -> str:
    """Return an option's name: "num_layers" for "--num-layers", "--num_layers" and "num_layers"."""
    return flag.strip().lstrip("-").replace("-", "_")


def _place(file: str) -> str:
    return f"{OPTION} {file}" if file else OPTION


# --- commands


def _of_text(text: str, file: str) -> Mapping[str, Any]:
    """Return the arguments of a command line, of lines of arguments, or of a script."""
    first = next((line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")), "")
    try:
        plain = read_words(text) if first.startswith("-") else None
        script = read_script(text) if plain is None else None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{_place(file)}: cannot be read ({one_line(error)}); expected arguments") from None
    if plain is not None:
        return _of_words(plain, file)
    assert script is not None
    words = _most_arguments(script)
    if words is None:
        raise InputError(f"{_place(file)}: holds no arguments of Megatron-LM; expected --num-layers and others")
    out = dict(_of_words(words, file))
    out |= _of_environment(script.constants)
    for key, names in _VARIABLES.items():
        found = [value for name in names if isinstance(value := script.constants.get(name), str) and value.isdigit()]
        if found and key not in out:
            out[key] = found[0]
    return out


def _most_arguments(script: Script) -> list[str] | None:
    """Return the words of the command with the most options of Megatron's; of all arrays and texts if no command has
    any."""
    commands = [_split(command.words) for command in script.commands]
    values = [_split((value,) if isinstance(value, str) else value) for value in script.constants.values()]
    for candidates in (commands, [[word for value in values if _flags(value) for word in value]]):
        best = max(candidates, key=_flags, default=None)
        if best and _flags(best):
            return best
    return None


def _split(words: Iterable[str]) -> list[str]:
    """Return the words, of which one may be a command of its own: `bash -c "torchrun ..."`."""
    return [part for word in words for part in (word.split() if _COMMAND.search(word) else (word,))]


def _flags(words: Iterable[str]) -> int:
    return sum(
        word.startswith("--") and name_of(word.partition("=")[0]).replace("_", "-") in KNOWN - {"help"}
        for word in words
    )


def _of_words(words: Sequence[str], file: str) -> dict[str, Any]:
    """Return the arguments of a command's words; the launcher's options stand before the Python file."""
    out: dict[str, Any] = {}
    at = _script_at(words)
    if at is not None:
        launcher, _ = _parsed([word for word in words[:at] if word != "-m"])
        out |= {_LAUNCHER[flag]: value for flag, value in launcher.items() if flag in _LAUNCHER}
        out[SCRIPT] = words[at]
        words = words[at + 1 :]
    else:  # the name of the command
        words = words[next((i for i, word in enumerate(words) if _FLAG.match(word)), len(words)) :]
    if not _flags(words):
        raise InputError(f"{_place(file)}: holds no arguments of Megatron-LM; expected --num-layers and others")
    arguments, unread = _parsed(words)
    out |= {name_of(flag): value for flag, value in arguments.items()}
    if unread:
        out[UNREAD] = unread
    return out


def _script_at(words: Sequence[str]) -> int | None:
    """Return the place of the Python file, or of a module after -m; None if there is none before Megatron's options."""
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        is_file = word.endswith(".py") and not word.startswith("-") and not _takes_value(before)
        if (before == "-m" and word not in _LAUNCHERS) or is_file:
            return at
    return None


def _takes_value(word: str) -> bool:
    """Tell whether a word is one of Megatron's options with a value, as `--spec`, which may be a Python file."""
    name = name_of(word).replace("_", "-")
    return word.startswith("--") and name in KNOWN and name not in SWITCHES


def _parsed(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return {"num-layers": "32"}, and the words that belong to no option. The last one of two counts."""
    out: dict[str, Any] = {}
    unread: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _FLAG.match(word):
            unread.append(word)
            continue
        flag, equals, given = word.partition("=")
        name = name_of(flag).replace("_", "-")
        values = [given] if equals else []
        while at < len(words) and not _FLAG.match(words[at]):
            values.append(words[at])
            at += 1
        if name in SWITCHES:
            is_word = bool(values) and values[0].lower() in ("true", "false")
            out[name], rest = (values[0], values[1:]) if is_word else (True, values)
            unread += rest
        elif name in SINGLE:  # without a value it is refused where it is read
            out[name], rest = values[0] if values else "", values[1:]
            unread += rest
        else:
            out[name] = True if not values else values[0] if len(values) == 1 else values
    return out, unread

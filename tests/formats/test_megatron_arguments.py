"""Megatron-LM's arguments from texts, lists, mappings and files."""

from __future__ import annotations

import argparse
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from memcalc import InputError
from memcalc.formats.megatron_arguments import arguments_of
from memcalc.formats.megatron_flags import KNOWN, SEVERAL, SINGLE, SWITCHES
from memcalc.formats.megatron_shell import read_script


def parsed(source: Any) -> dict[str, Any]:
    return dict(arguments_of(source)[1])


def in_file(folder: Path, name: str, text: str) -> dict[str, Any]:
    path = folder / name
    path.write_text(text)
    file, arguments = arguments_of(path)
    assert file == name
    return dict(arguments)


# --- the oracle: argparse over options of the same kinds


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    for name in SWITCHES:
        made.add_argument(f"--{name}", action="store_true", default=None)
    for name in SINGLE:
        made.add_argument(f"--{name}", default=None)
    for name in SEVERAL:
        made.add_argument(f"--{name}", nargs="+", default=None)
    return made


def command_line(choice: random.Random) -> str:
    words: list[str] = []
    for name in choice.sample(sorted(KNOWN - {"help"}), 30):
        flag = f"--{name}"
        if name in SINGLE:
            value = choice.choice(["7", "1e-5", "-1", "a/b.json", "'two words'", "([0]*3+[1]*58)", "E|(t|)*3L"])
            value = shlex.quote(value.strip("'")) if value != "-1" else value
            words += [f"{flag}={value}"] if choice.random() < 0.3 else [flag, value]
        elif name in SEVERAL:
            words += [flag, *(str(choice.randint(0, 9)) for _ in range(choice.randint(1, 3)))]
        else:
            words.append(flag)
    return " ".join(words)


@pytest.mark.parametrize("seed", range(40))
def test_a_command_line_is_read_as_argparse_reads_it(seed: int) -> None:
    text = command_line(random.Random(seed))
    real = {name: value for name, value in vars(parser().parse_args(shlex.split(text))).items() if value is not None}
    ours = {name: [value] if name.replace("_", "-") in SEVERAL and isinstance(value, str) else value
            for name, value in parsed(text).items()}  # fmt: skip
    assert ours == real
    assert parsed(shlex.split(text)) == parsed(text)
    assert parsed(f"torchrun --nproc-per-node 8 pretrain_gpt.py {text}") == {
        **parsed(text), "nproc_per_node": "8", "training_script": "pretrain_gpt.py",
    } or "(" in text  # fmt: skip


# --- texts


def test_lines_with_comments_belong_together() -> None:
    text = "# sizes\n--num-layers 4 \\\n--hidden-size 64  # of all heads\n--bf16\n--moe-layer-freq ([0]*1+[1]*3)\n"
    assert parsed(text) == {
        "num_layers": "4", "hidden_size": "64", "bf16": True, "moe_layer_freq": "([0]*1+[1]*3)",
    }  # fmt: skip


def test_underscores_equal_signs_and_the_last_of_two() -> None:
    assert parsed("--num_layers=4 --num-layers 8 --bf16 true") == {"num_layers": "8", "bf16": "true"}


def test_a_value_may_be_negative_but_not_an_option() -> None:
    assert parsed("--seed -1 --bf16 --load --save x") == {"seed": "-1", "bf16": True, "load": "", "save": "x"}


def test_words_of_no_option_are_kept_apart() -> None:
    assert parsed("--bf16 $EXTRA --num-layers 4 more") == {
        "bf16": True, "num_layers": "4", "unread": ["$EXTRA", "more"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "key", "value"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=4", "nnodes", "4"),
        ("python -m torch.distributed.run --nproc-per-node=8", "nproc_per_node", "8"),
        ("deepspeed --num_gpus 4", "nproc_per_node", "4"),
    ],
)
def test_a_launcher_tells_the_gpus(launcher: str, key: str, value: str) -> None:
    arguments = parsed(f"{launcher} --master_port 6000 pretrain_gpt.py --num-layers 4 --bf16")
    assert arguments[key] == value
    assert arguments["training_script"] == "pretrain_gpt.py"
    assert arguments["num_layers"] == "4"
    assert "master_port" not in arguments


def test_a_module_is_a_training_script_too() -> None:
    arguments = parsed("torchrun --nproc-per-node 2 -m tools.pretrain_gpt --num-layers 4")
    assert (arguments["nproc_per_node"], arguments["num_layers"]) == ("2", "4")


# --- mappings


def test_mappings_with_any_spelling() -> None:
    same = {"num_layers": 4, "bf16": True}
    assert parsed({"--num-layers": 4, "--bf16": True}) == same
    assert parsed({"num_layers": 4, "bf16": True}) == same
    assert parsed({"MODEL_ARGS": {"--num-layers": 4, "--bf16": True}, "ENV_VARS": {"A": 1}}) == same
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    config = {"cublas_workspace_config": ":4096:8"}
    assert parsed({"MODEL_ARGS": {"--num-layers": 4, "--bf16": True}, "ENV_VARS": environment}) == same | config
    for unread in (None, "x", [], {"CUBLAS_WORKSPACE_CONFIG": "4096"}, {"CUBLAS_WORKSPACE_CONFIG": [":4096:8"]}):
        assert parsed({"MODEL_ARGS": {"--num-layers": 4, "--bf16": True}, "ENV_VARS": unread}) == same
    assert parsed({"MODEL_ARGS": "--num-layers 4 --bf16"}) == {"num_layers": "4", "bf16": True}
    assert parsed({"MODEL_ARGS": ["--num-layers", 4, "--bf16"]}) == {"num_layers": "4", "bf16": True}
    assert parsed({"language_model": {"num_layers": 4}, "bf16": True}) == same


def test_files_of_yaml_json_and_text(tmp_path: Path) -> None:
    same = {"num_layers": 4, "bf16": True}
    assert (
        in_file(tmp_path, "model_config.yaml", "MODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\nTEST_TYPE: x\n") == same
    )
    assert in_file(tmp_path, "a.json", '{"num_layers": 4, "bf16": true}') == same
    assert in_file(tmp_path, "b", "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\n") == same
    assert in_file(tmp_path, "c.args", "--num-layers 4\n--bf16\n") == {"num_layers": "4", "bf16": True}


# --- scripts

LAUNCH = """#!/bin/bash
#SBATCH --nodes=4
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-2}
TP=${TP:=4}
PP=$1
WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))
PRECISION="bf16"
if [ -z "$RUN_NAME" ]; then
    MBS=2
fi
if [[ "$PRECISION" == "fp16" ]]; then
    HALF="--fp16"
elif [ $PRECISION = bf16 ] && [ $TP -gt 1 ]; then
    HALF="--bf16"
else
    HALF=""
fi
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # of a node
    --nnodes $NNODES
)
GPT_ARGS="
    --num-layers 12 \\
    --hidden-size 512
    --tensor-model-parallel-size ${TP}
    --pipeline-model-parallel-size $PP
    --micro-batch-size $MBS
"
MOE=( --moe-layer-freq "([0]*3+[1]*9)" )
MOE+=(--swiglu)
[ "$TP" -gt 1 ] && MOE+=(--sequence-parallel)
if [ "$SAVE" = true ]; then
    GPT_ARGS="$GPT_ARGS --save x"
fi
cat <<EOF > hostfile
torchrun --nproc_per_node 1 other.py --num-layers 99 --bf16 --swiglu
EOF
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $GPT_ARGS "${MOE[@]}" $HALF \\
    --global-batch-size $((WORLD_SIZE * 4)) "$@" 2>&1 | tee log.txt
"""


def test_the_static_part_of_a_launch_script(tmp_path: Path) -> None:
    assert in_file(tmp_path, "run.sh", LAUNCH) == {
        "nproc_per_node": "8",
        "nnodes": "2",
        "training_script": "pretrain_gpt.py",
        "num_layers": "12",
        "hidden_size": "512",
        "tensor_model_parallel_size": "4",
        "pipeline_model_parallel_size": "$PP",
        "micro_batch_size": "$MBS",
        "moe_layer_freq": "([0]*3+[1]*9)",
        "swiglu": True,
        "sequence_parallel": True,
        "bf16": True,
        "global_batch_size": "64",
        "unread": ["$GPT_ARGS", "${@}"],
    }


def test_nothing_is_executed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    text = (
        f"X=$(touch {made})\n`touch {made}`\neval touch {made}\ntorchrun a.py --num-layers 4 --save $(touch {made})\n"
    )
    assert in_file(tmp_path, "run.sh", text)["num_layers"] == "4"
    assert not made.exists()


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ("A=1; A=2", "2"),
        ("A=1\nif [ -f x ]; then A=2; fi", "$A"),
        ("A=1\nif [ -f x ]; then A=1; fi", "1"),
        ("A=1\nif false; then A=2; fi", "1"),
        ("B=x\nif [ $B != x ]; then A=1; else A=2; fi", "2"),
        ("B=x\ncase $B in\nx) A=1;;\nesac", "$A"),
        ("for A in 1 2; do true; done", "$A"),
        ("f() {\nA=1\n}", "$A"),
        ("[ -n '' ] && A=1 || A=2", "2"),
        ("test -d x && A=1", "$A"),
        ("A=1 && B=2", "1"),
        ("export A=${B:-${C:-3}}", "3"),
        ("A=$(nproc)", "$A"),
        ("A=1\nread A", "$A"),
        ("B=6\nA=$((B*2/3 - (1+1)))", "2"),
        ("A=$((B*2))", "$A"),
        ("A=(7 8)", "7"),
        (": ${A:=5}", "5"),
        ("A='1' # comment", "1"),
        ("unset Z\nA=1\\\n2", "12"),
    ],
)
def test_constants_of_a_script(lines: str, value: str) -> None:
    commands = read_script(f"{lines}\ntorchrun x.py --num-layers $A\n").commands
    assert commands[-1].words[-1] == value


def test_a_command_in_quotes(tmp_path: Path) -> None:
    text = 'ARGS="--num-layers 4 --bf16"\nCMD="torchrun --nnodes 2 pretrain_gpt.py $ARGS"\nsrun bash -c "$CMD"\n'
    arguments = in_file(tmp_path, "run.sh", text)
    assert (arguments["num_layers"], arguments["bf16"], arguments["nnodes"]) == ("4", True, "2")


def test_arguments_without_a_command(tmp_path: Path) -> None:
    assert in_file(tmp_path, "conf.sh", 'MODEL_ARGS=" \\\n  --num-layers 4 \\\n  --bf16 "\n') == {
        "num_layers": "4", "bf16": True,
    }  # fmt: skip


# --- errors


@pytest.mark.parametrize(
    "source",
    [
        "", "   ", "missing.sh", 3, None, [], {"MODEL_ARGS": 3}, {3.5: {}, None: 1}, "x --y", "echo --foo", b"--bf16",
        "--bf16 " * 200_000, "A=x\n" + 'A="$A$A"\n' * 60 + "x --bf16 $A", "x --bf16 " + "A=(" * 3000,
        "if [ a = a ]\nthen\n" * 3000 + "x --bf16",
    ],
)  # fmt: skip
def test_nonsense_is_one_line(source: Any) -> None:
    with pytest.raises(InputError) as error:
        arguments_of(source)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("--megatron-args")


@pytest.mark.parametrize("text", ["MODEL_ARGS: [", "MODEL_ARGS: 3", "- a", "MODEL_ARGS:\n  [a]: b"])
def test_bad_files_are_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError) as error:
        in_file(tmp_path, "a.yaml", text)
    assert "\n" not in str(error.value)
    assert "a.yaml" in str(error.value)


_PIECES = (
    "if", "then", "fi", "else", "elif", "done", "for x in", "case", "esac", "{", "}", "[[", "]]", "-z", "$A", "${A}",
    "${A:-${B}}", "$((1/0))", "A=1", 'B="$A $A"', "A+=(1)", "A=(", "(", ")", '"', "'", "`", "\\\n", "\n", "<<EOF", "EOF",
    "&&", "||", "|", "&", "--num-layers", "4", "--bf16", "pretrain.py", "#", "export", ">", "2>&1", "$@", "f()", "read",
)  # fmt: skip


def test_any_script_is_read_or_refused() -> None:
    choice = random.Random(0)
    for _ in range(2000):
        text = " ".join(choice.choice(_PIECES) for _ in range(choice.randint(1, 40)))
        try:
            arguments_of(f"x\n--{text}")
        except InputError as error:
            assert "\n" not in str(error)

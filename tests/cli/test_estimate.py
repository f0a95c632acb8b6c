"""`memcalc estimate`: what it prints, where it writes, and that every bad input is one line that helps."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from command import LLAMA, LONG, check_refused, here, program, write_config

import memcalc

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 100,
    "n_positions": 128,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may ask the Hub, whatever is in the environment."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def estimate(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return here(capsys, "estimate", *arguments)


# --- what it prints and writes


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    ran = estimate(capsys, "-m", "llama-7b", "-g", "8", "--zero", "3", "--gpu", "a100-80gb")
    assert ran.status == 0
    assert ran.stderr == ""
    for text in (
        "parameters",
        "optimizer states",
        "saved activations",
        "all_gather",
        "fits NVIDIA A100",
    ):
        assert text in ran.stdout


def test_verbose_has_phases_every_collective_and_flops(capsys: pytest.CaptureFixture[str]) -> None:
    plain, more = (
        estimate(capsys, "-m", "llama-7b", "-g", "8", "--zero", "3", *flags).stdout for flags in ([], ["--verbose"])
    )
    for text in ("peak by phase", "gradient buckets", "matrix products", "textbook", "rounding of blocks"):
        assert text in more
        assert text not in plain
    assert "--verbose" in plain
    assert "--verbose" not in more


def test_rows_show_every_row_with_its_formula(capsys: pytest.CaptureFixture[str]) -> None:
    plain, rows = (estimate(capsys, "-m", "gpt2", *more).stdout for more in ([], ["--rows"]))
    assert "Rows" not in plain
    for name in ("transformer.wte.weight", "CUDA context", "vocab·hidden·"):
        assert name in rows


def test_json_equals_the_python_document(capsys: pytest.CaptureFixture[str]) -> None:
    ran = estimate(capsys, "-m", "gpt2", "-b", "2", "-s", "64", "--precision", "fp32", "--gpu", "t4", "--json")
    report = memcalc.estimate("gpt2", micro_batch_size=2, seq_len=64, precision="fp32", gpu="t4")
    assert json.loads(ran.stdout) == report.to_dict()


@pytest.mark.parametrize("kind", ["table", "json", "csv", "markdown"])
def test_output_writes_what_stdout_would_show(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out"
    shown = estimate(capsys, "-m", "gpt2", "--format", kind)
    written = estimate(capsys, "-m", "gpt2", "--format", kind, "-o", str(path))
    assert written == (0, "", "")
    assert path.read_text(encoding="utf-8") == shown.stdout
    assert shown.stdout.endswith("\n")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.json", "json"),
        ("X.JSON", "json"),
        ("x.csv", "csv"),
        ("x.md", "markdown"),
        ("x.txt", "table"),
        ("json", "table"),
    ],
)
def test_the_name_of_the_output_is_its_format(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert estimate(capsys, "-m", "gpt2", "-o", str(path)) == (0, "", "")
    assert path.read_text(encoding="utf-8") == estimate(capsys, "-m", "gpt2", "--format", kind).stdout
    if kind != "table":
        other = "json" if kind == "csv" else "csv"
        refused = estimate(capsys, "-m", "gpt2", "-o", str(tmp_path / f"other{path.suffix}"), "--format", other)
        check_refused(refused, "--output", f"contradicts --format {other}", f"allowed: --format {kind}")
        assert not (tmp_path / f"other{path.suffix}").exists()


def test_a_suffix_that_no_format_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x.foo", "x.v2", "x.json.gz"):
        refused = estimate(capsys, "-m", "gpt2", "-o", str(tmp_path / name))
        check_refused(refused, "--output", Path(name).suffix, ".json, .csv, .md, .markdown, .txt", "--format")
    assert list(tmp_path.iterdir()) == []
    assert estimate(capsys, "-m", "gpt2", "--format", "table", "-o", str(tmp_path / "x.foo")) == (0, "", "")
    assert (tmp_path / "x.foo").read_text(encoding="utf-8").startswith("gpt2")


def test_a_dash_is_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--json"], ["--format", "csv"]):
        assert estimate(capsys, "-m", "gpt2", *more, "-o", "-") == estimate(capsys, "-m", "gpt2", *more)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["csv", "markdown"])
def test_layers_and_ranks_are_in_every_format(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup = ("-m", "gpt2", "-g", "4", "--pp", "2", "--tp", "2", "--format", kind)
    plain = estimate(capsys, *setup).stdout
    layers, ranks = (estimate(capsys, *setup, flag).stdout for flag in ("--per-layer", "--all-ranks"))
    assert len(plain) < min(len(layers), len(ranks))
    assert layers != ranks


def test_csv_has_a_header(capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(csv.reader(estimate(capsys, "-m", "gpt2", "--format", "csv").stdout.splitlines()))
    assert lines[0][:4] == ["table", "component", "name", "nbytes"]


def test_bad_input_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out"
    check_refused(estimate(capsys, "-m", "gpt2", "-b", "0", "-o", str(path)))
    assert not path.exists()


def test_flags_may_be_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    ran = estimate(capsys, "-m", "gpt2", "--no-sequence-parallel", "--json")
    assert ran.status == 0
    assert json.loads(ran.stdout)["setup"]["sequence_parallel"] is False


def test_params_alone_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(estimate(capsys, "--params", "7.5B", "--json").stdout)
    assert document["memory"]["peak"] == 16 * 7_500_000_000
    assert document["model"]["name"] is None


@pytest.mark.parametrize("name", ["[red]mine", "a\nb", "\x1b[31mred", "é 🦙", LONG[:200]])
def test_any_folder_name_is_shown_on_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder's name is the model's: it can hold what a terminal would obey."""
    folder = tmp_path / name
    folder.mkdir()
    write_config(folder, LLAMA)
    for kind in ("table", "csv", "markdown"):
        ran = estimate(capsys, "-m", str(folder), "--format", kind)
        assert ran.status == 0
        assert all(line.isprintable() for line in ran.stdout.splitlines())
    shown = estimate(capsys, "-m", str(folder)).stdout
    assert shown.startswith(" ".join(name.replace("\x1b", " ").split())[:60])


def test_a_folder_name_that_is_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / "\udcff"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    write_config(folder, LLAMA)
    for output in ([], ["--json"]):
        ran = program("estimate", "-m", str(folder), *output, PYTHONIOENCODING="utf-8:strict")
        assert ran.stderr == ""
        assert ran.status == 0


# --- options


MODEL = ["--model", "gpt2"]
EIGHT = [*MODEL, "--gpus", "8"]
OPTIMIZERS = [
    "adamw", "adam", "sgd", "sgd-momentum", "adafactor", "lion", "adamw-8bit", "muon", "adam-8bit", "lion-8bit", "paged-adamw",
    "paged-adamw-8bit", "paged-adam", "paged-adam-8bit", "paged-lion", "paged-lion-8bit", "apollo-adamw", "galore-adamw",
    "lamb", "onebit-adam", "onebit-lamb", "zero-one-adam",
]  # fmt: skip
WHOLE = (
    "--gpus", "--gpus-per-node", "--dp", "--tp", "--pp", "--cp", "--ep", "--etp", "--shard-group", "--virtual-stages",
    "--micro-batch-size", "--seq-len", "--global-batch-size",
)  # fmt: skip
NAMES = {
    "--precision": ["bf16-mixed", "fp32"],
    "--grad-dtype": ["fp32", "bf16"],
    "--optimizer": OPTIMIZERS,
    "--optimizer-implementation": ["foreach", "fused", "for-loop"],
    "--recompute": ["none", "selective", "op", "full"],
    "--attention": ["eager", "sdpa", "flash"],
    "--cross-entropy": ["eager", "vocab-parallel", "fused", "chunked"],
    "--kernels": ["hf", "fused", "megatron"],
    "--schedule": ["gpipe", "1f1b", "interleaved", "zero-bubble"],
    "--engine": ["none", "ddp", "fsdp2", "deepspeed", "megatron"],
}


@pytest.mark.parametrize(("option", "value"), [*((o, "0") for o in WHOLE), ("--gpus", "-4"), ("--seq-len", "1" * 30)])
def test_whole_numbers_have_bounds(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(estimate(capsys, *MODEL, option, value), option, value, "allowed", " 1 to ")


NOT_WHOLE = ("1.5", "1e3", "0x8", "", "8" * 5000, "a\nb", "🦙")


@pytest.mark.parametrize(
    ("option", "value"), [*((o, "abc") for o in (*WHOLE, "--zero", "--pp-rank")), *(("--gpus", v) for v in NOT_WHOLE)]
)
def test_whole_numbers_are_whole(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(value[:40].split()) or "''"
    check_refused(estimate(capsys, *MODEL, option, value), option, shown, "whole number")


@pytest.mark.parametrize(
    ("option", "value"),
    [*((o, "nope") for o in NAMES), *(("--optimizer", v) for v in ("", "a\nb", "\x1b[31m", "🦙", LONG, "ADAMW!", "0"))],
)
def test_names_are_listed(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(estimate(capsys, *MODEL, option, value), f"{option} ", "allowed", *NAMES[option])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # what does not fit together
        ([*EIGHT, "--tp", "3"], ["--gpus 8", "tp 3", "multiple of 3"]),
        ([*EIGHT, "--tp", "3", "--pp", "2", "--cp", "2"], ["--gpus 8", "12"]),
        ([*EIGHT, "--dp", "4"], ["--dp 4", "allowed: 8"]),
        ([*EIGHT, "--zero", "4"], ["--zero 4", "0 to 3"]),
        ([*EIGHT, "--zero", "-1"], ["--zero -1", "0 to 3"]),
        ([*EIGHT, "--zero", "1", "--optimizer", "sgd"], ["--zero 1", "sgd", "allowed"]),
        ([*EIGHT, "--zero", "3", "--optimizer", "sgd"], ["--zero 3", "sgd", "allowed"]),
        ([*EIGHT, "--zero", "2", "--engine", "ddp"], ["--zero 2", "ddp", "deepspeed"]),
        (
            [*EIGHT, "--zero", "2", "--precision", "bf16-autocast"],
            ["--precision bf16-autocast", "torch_autocast", "fp32"],
        ),
        ([*EIGHT, "--engine", "none"], ["--engine none", "8", "ddp"]),
        ([*EIGHT, "--global-batch-size", "12"], ["--global-batch-size 12", "multiple of 8"]),
        ([*EIGHT, "-b", "2", "--global-batch-size", "8"], ["--global-batch-size 8", "multiple of 16"]),
        ([*EIGHT, "--shard-group", "3"], ["--shard-group 3", "8"]),
        ([*MODEL, "--pp-rank", "1"], ["--pp-rank 1", "0 to 0"]),
        ([*MODEL, "--pp-rank", "-1"], ["--pp-rank -1", "0 to"]),
        ([*MODEL, "--seq-len", "1025"], ["--seq-len 1025", "1024"]),
        (
            [*MODEL, "--optimizer", "adafactor", "--optimizer-implementation", "fused"],
            ["fused", "adafactor", "foreach"],
        ),
        (["--model", "gemma-2-2b", "--attention", "sdpa"], ["--attention sdpa", "gemma2", "eager"]),
        ([*MODEL, "--expert-imbalance", "0.5"], ["--expert-imbalance 0.5", "from 1"]),
        ([*MODEL, "--expert-imbalance", "nan"], ["--expert-imbalance nan", "from 1"]),
        ([*MODEL, "--expert-imbalance", "inf"], ["--expert-imbalance inf", "from 1"]),
        ([*MODEL, "--expert-imbalance", "abc"], ["--expert-imbalance", "abc", "number"]),
        ([*MODEL, "--expert-imbalance", "1.5"], ["--expert-imbalance 1.5", "no routed experts", "allowed: 1.0"]),
        (["--model", "mixtral-8x7b", "--expert-imbalance", "5"], ["--expert-imbalance 5.0", "2 of 8", "1 to 4"]),
        # the GPU
        ([*MODEL, "--gpu", "h1000"], ["--gpu h1000", "h100-80gb"]),
        ([*MODEL, "--gpu", "nosuchgpu"], ["--gpu nosuchgpu", "memcalc gpus"]),
        ([*MODEL, "--gpu", ""], ["--gpu ''", "memcalc gpus"]),
        ([*MODEL, "--gpu", LONG], ["--gpu xxx", "memcalc gpus"]),
        ([*MODEL, "--gpu", "a\nb\x1b"], ["--gpu a b", "memcalc gpus"]),
        ([*MODEL, "--check"], ["--check", "--gpu"]),
        # the output
        ([*MODEL, "--output", "/no/such/folder/x"], ["--output /no/such/folder/x", "No such file"]),
        ([*MODEL, "--json", "--output", "/no/such/folder/x"], ["--output /no/such/folder/x"]),
        ([*MODEL, "--output", "/"], ["--output /", "directory"]),
        ([*MODEL, "--output", ""], ["--output ''"]),
        ([*MODEL, "--output", LONG], ["--output xxx"]),
        ([*MODEL, "--output", "a\0b"], ["--output"]),
        ([*MODEL, "--format", "xml"], ["--format xml", "table, json, csv, markdown"]),
        ([*MODEL, "--format", ""], ["--format ''", "table, json, csv, markdown"]),
        ([*MODEL, "--format", LONG], ["--format xxx", "table, json, csv, markdown"]),
        ([*MODEL, "--json", "--format", "csv"], ["--format csv", "--json"]),
        ([*MODEL, "--json", "--output", "x.csv"], ["--output x.csv", "--json", "--format csv"]),
        ([*MODEL, "--format", "table", "--output", "x.json"], ["--output x.json", "--format table", "--format json"]),
        # the command line itself
        ([], ["--model", "--params"]),
        ([*MODEL, "--params", "7B"], ["--model", "--params"]),
        ([*MODEL, "--nope"], ["--nope"]),
        ([*MODEL, "--nope", "3"], ["--nope"]),
        ([*MODEL, "--micro-batch", "3"], ["--micro-batch"]),
        ([*MODEL, "--no\npe"], ["--no"]),
        ([*MODEL, "--" + LONG], ["--xxx"]),
        ([*MODEL, "-z"], ["-z"]),
        ([*MODEL, "extra"], ["extra"]),
        ([*MODEL, "two\nlines"], ["two"]),
        ([*MODEL, "--gpus"], ["--gpus"]),
        ([*MODEL, "--gpus", "--zero"], ["--gpus"]),
        ([*MODEL, "--json=3"], ["--json"]),
    ],
)
def test_refused(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(estimate(capsys, *arguments), *words)


@pytest.mark.parametrize(
    "value",
    [
        "abc",
        "0",
        "-1",
        "1e400",
        "7.5Q",
        "",
        "1.5",
        "99999T",
        "9" * 10_000,
        "9" * 5000 + "B",
        "nan",
        "inf",
        "٣",
        LONG,
        "1B2",
        "B",
    ],
)
def test_params_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(estimate(capsys, "--params", value), "--params", value[:40], "7.5B")


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "apollo-adamw", "galore-adamw"])
def test_params_have_no_shapes(optimizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(estimate(capsys, "--params", "7B", "--optimizer", optimizer), f"--optimizer {optimizer}", "adamw")


# --- models


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama-7b", ["lama-7b", "llama-7b"]),
        ("zzzzzzzz9", ["zzzzzzzz9", "memcalc models"]),
        ("", ["''"]),
        ("   ", ["' '"]),
        (LONG, ["xxx", "unknown model"]),
        ("llama-7b\n", ["llama-7b"]),
        ("a\nb\x1b[31m", ["a b", "unknown model"]),
        ("x\0y", ["x y", "unknown model"]),
        ("🦙", ["🦙", "unknown model"]),
        ("[bold]x[/]", ["[bold]x[/]"]),
        ("/no/such/config.json", ["/no/such/config.json", "no such file"]),
        ("./nosuch", ["./nosuch", "no such file"]),
        ("nosuch.json", ["nosuch.json", "no such file"]),
        ("a/b/c", ["a/b/c", "no such file"]),
        ("owner/" + "x" * 500, ["owner/xxx", "not a Hub id"]),
        ("owner/a--b", ["owner/a--b", "not a Hub id"]),
        ("owner/..", ["owner/.."]),
        ("owner/nosuchrepository", ["owner/nosuchrepository", "HF_HUB_OFFLINE"]),
    ],
)
def test_model_refused(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(estimate(capsys, "--model", name), "--model", *words)


@pytest.mark.parametrize("content", ["{", "[1", "{'a': 1}", "", "\n", b"\xff", b"\xff\xfe\x00{}", b"\x80abc", "[" * 100_000,
                                     '{"a":' * 5000, '{"hidden_size": 1' + "0" * 5000 + "}"])  # fmt: skip
def test_broken_json(content: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, content)
    check_refused(estimate(capsys, "--model", path), "--model", path[:60], "not valid JSON")


@pytest.mark.parametrize("content", ["[]", '[{"model_type": "llama"}]', "null", "3", '"llama"', "NaN", "true"])
def test_json_that_is_no_object(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(estimate(capsys, "--model", write_config(tmp_path, content)), "--model", "object")


def test_folders_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(estimate(capsys, "--model", str(tmp_path)), "--model", str(tmp_path)[:60], "no config.json")
    (tmp_path / "config.json").mkdir()
    check_refused(estimate(capsys, "--model", str(tmp_path)), "--model", "config.json")


@pytest.mark.parametrize("model_type", ["berd", "lama", "", "a\nb", LONG, "LLAMA"])
def test_unknown_model_type_is_refused(model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, {**LLAMA, "model_type": model_type})
    check_refused(estimate(capsys, "--model", path), "model_type", "neither memcalc nor transformers")


@pytest.mark.parametrize("value", [-1, 0, 10**30, 1.5, True, None, [1], {"a": 1}, []])
def test_model_type_that_is_no_name(value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, {**LLAMA, "model_type": value})
    check_refused(estimate(capsys, "--model", path), "model_type", repr(value))


def test_missing_model_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ({}, {k: v for k, v in LLAMA.items() if k != "model_type"}):
        check_refused(estimate(capsys, "--model", write_config(tmp_path, content)), "model_type", "missing")


BAD_COUNTS = [-1, 0, 10**30, 10**8, "x", "64", 1.5, 64.0, True, False, [1], None, {}, {"a": {"b": [None]}}, math.nan,
              math.inf, "é\n\x1b[0m", [[[]]], LONG]  # fmt: skip
COUNTS = ("intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize(
    ("field", "value"),
    [*(("hidden_size", value) for value in BAD_COUNTS), *((field, value) for field in COUNTS for value in (-1, "64"))],
)
def test_fields_of_a_llama(field: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, {**LLAMA, field: value})
    check_refused(estimate(capsys, "--model", path), "--model", f"`{field}`", repr(value)[:15])


@pytest.mark.parametrize("value", [0, 10**30, 1.5, None])
@pytest.mark.parametrize("field", ["n_embd", "n_layer", "n_head", "vocab_size", "n_positions"])
def test_fields_of_a_gpt2(field: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, {**GPT2, field: value})
    check_refused(estimate(capsys, "--model", path), "--model", f"`{field}`", repr(value)[:15])


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (LLAMA, "num_key_value_heads", 3),
        (LLAMA, "num_key_value_heads", 0),
        (LLAMA, "num_attention_heads", 6),
        (LLAMA, "head_dim", -1),
        (LLAMA, "head_dim", 15),
        (LLAMA, "hidden_act", "nope"),
        (LLAMA, "hidden_act", 3),
        (LLAMA, "attention_dropout", 1.5),
        (LLAMA, "attention_dropout", -1),
        (LLAMA, "attention_dropout", "0.1"),
        (LLAMA, "attention_dropout", math.nan),
        (LLAMA, "tie_word_embeddings", "yes"),
        (LLAMA, "attention_bias", 2),
        (LLAMA, "rope_scaling", [1]),
        (LLAMA, "rope_scaling", {"rope_type": "nope"}),
        (LLAMA, "rope_scaling", {"rope_type": "yarn"}),
        (LLAMA, "quantization_config", {"bits": 4}),
        (LLAMA, "max_position_embeddings", 0),
        (GPT2, "activation_function", "nope"),
        (GPT2, "n_inner", 0),
        (GPT2, "resid_pdrop", 1),
        (GPT2, "add_cross_attention", True),
    ],
)
def test_fields_that_mean_something_else(
    config: dict[str, Any], field: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, {**config, field: value})
    name = "rope_parameters" if isinstance(value, dict) and field == "rope_scaling" else field
    check_refused(estimate(capsys, "--model", path), "--model", name)


def test_a_strange_folder_name_in_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a\nb\x1b[31m"
    folder.mkdir()
    write_config(folder, {**LLAMA, "vocab_size": -1})
    check_refused(estimate(capsys, "--model", str(folder)), "vocab_size", "-1")
    check_refused(estimate(capsys, "--model", write_config(folder, "{")), "not valid JSON")

"""Every row of tests/measured against today's prediction. That this can fail is shown with records of the fake backend."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.device.shown import TRAINER_ERROR
from memcalc.validate.comparison import predicted_memory
from memcalc.validate.recording import read_record, run_suite
from memcalc.validate.records import STATED, drifted, errors_of, rows_of, verdicts_of

FOLDER = Path(__file__).resolve().parent.parent / "measured"
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
         "num_attention_heads": 4}  # fmt: skip
CASES = [
    {"model": LLAMA, "precision": "bf16", "seq_len": 16},
    {"model": LLAMA, "engine": "fsdp2", "zero": 3, "gpus": 8, "seq_len": 16},
    {"model": LLAMA, "precision": "fp7"},
]


each_record = pytest.mark.parametrize("record", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)


@each_record
def test_every_recorded_row_is_within_its_stated_error(record: Path) -> None:
    cases = read_record(record)
    assert {made["backend"] for made in cases} == {"cuda"}
    assert drifted(cases) == []


@pytest.mark.slow
@each_record
def test_no_recorded_run_is_said_to_fit_that_did_not(record: Path) -> None:
    assert verdicts_of(read_record(record)).wrongly_fits == []


def test_the_folder_holds_records_and_says_so() -> None:
    assert {path.suffix for path in FOLDER.iterdir()} <= {".json", ".md"}
    assert (FOLDER / "README.md").is_file()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "fake.json"
    run_suite(CASES, "fake", path, lambda _: None)
    return path


def test_what_was_measured_today_has_not_drifted(record: Path) -> None:
    cases = read_record(record)
    assert drifted(cases) == []
    assert [len(rows_of(made)) > 5 for made in cases] == [True, True, False]


@pytest.mark.parametrize(
    ("case", "part", "row"), [(0, "memory", "saved_activations"), (0, "memory", "peak"), (1, "communication", None)]
)
def test_a_row_that_drifts_is_named(record: Path, case: int, part: str, row: str | None) -> None:
    cases = read_record(record)
    rows = cases[case][part]
    altered = next(one for one in rows if row in (None, one["name"]))
    altered["measured"] += 1
    (line,) = drifted(cases)
    assert line.startswith("llama ")
    assert altered["name"] in line
    assert "stated 0.00%" in line


def test_a_collective_that_is_not_predicted_any_more(record: Path) -> None:
    cases = read_record(record)
    cases[1]["communication"].append({"name": "all_to_all over 8: calls", "predicted": 1, "measured": 1})
    (line,) = drifted(cases)
    assert "all_to_all over 8: calls predicted 0, measured 1" in line


def test_a_collective_that_was_never_measured(record: Path) -> None:
    cases = read_record(record)
    gone = cases[1]["communication"].pop()
    (line,) = drifted(cases)
    assert f"{gone['name']} predicted {gone['predicted']}, measured 0" in line


def test_a_case_that_is_refused_by_now(record: Path) -> None:
    cases = read_record(record)
    cases[0]["case"] |= {"precision": "fp9"}
    (line,) = drifted(cases)
    assert "--precision fp9" in line


# --- as a GPU would record it


def of_a_gpu(model: Any, capacity: int, *, outcome: str = "measured", factor: float = 1.0) -> dict[str, Any]:
    """A case whose measured bytes are the predicted ones times a factor. Nothing of it was measured."""
    case = {"model": model, "precision": "bf16", "seq_len": 16}
    environment = {"gpu": "a GPU", "compute_capability": "8.0", "memory": str(capacity)}
    made: dict[str, Any] = {"case": case, "backend": "cuda", "outcome": outcome, "environment": environment}
    if outcome != "measured":
        return made | {"why": "CUDA out of memory."}
    report = memcalc.estimate(model, precision="bf16", seq_len=16)
    predicted = predicted_memory(report, "cuda", environment, real_ranks=False)
    rows = [
        {"name": name, "predicted": size, "measured": round(size * (factor if name in ("peak", "reserved") else 1))}
        for name, size in predicted.items()
    ]
    return made | {"seconds": 0.25, "real_ranks": False, "memory": rows, "communication": []}


def test_a_gpus_rows_have_bounds_of_their_own() -> None:
    assert drifted([of_a_gpu(LLAMA, 10**12)]) == []
    assert drifted([of_a_gpu(LLAMA, 10**12, factor=1.01)]) == []
    (line,) = drifted([of_a_gpu(LLAMA, 10**12, factor=1.05)])
    assert "peak predicted" in line
    assert "stated 1.50%" in line
    lines = drifted([of_a_gpu(LLAMA, 10**12, factor=0.8)])
    assert len(lines) == 2
    assert STATED["reserved"] > STATED["peak"] > STATED["parameters"] == 0
    assert "context" not in STATED


def test_errors_and_verdicts() -> None:
    models = [LLAMA | {"num_hidden_layers": layers} for layers in (1, 2, 3, 4)]
    room = memcalc.estimate(models[0], precision="bf16", seq_len=16).device
    cases = [
        of_a_gpu(models[0], room), of_a_gpu(models[1], 10**12, factor=1.1), of_a_gpu(models[2], 1000, factor=0.8),
        of_a_gpu(models[3], 10**12, outcome="out of memory"), of_a_gpu(models[3], 1000, outcome="out of memory"),
    ]  # fmt: skip
    enough = room + room * TRAINER_ERROR // 100 + 1
    assert verdicts_of([of_a_gpu(models[0], enough)]).right == 1
    assert len(verdicts_of([of_a_gpu(models[0], room // 2)]).wrongly_does_not_fit) == 1
    cases[0]["environment"]["memory"] = str(enough)
    errors = errors_of([row for made in cases for row in rows_of(made)])
    assert (errors["peak"].cases, errors["peak"].over, errors["peak"].under) == (3, 1, 1)
    assert errors["peak"].worst == pytest.approx(0.25, abs=1e-4)
    assert errors["peak"].median == pytest.approx(1 - 1 / 1.1, abs=1e-4)
    assert errors["allocated"].worst == 0
    verdicts = verdicts_of(cases)
    assert (verdicts.right, len(verdicts.wrongly_fits), len(verdicts.wrongly_does_not_fit)) == (3, 1, 1)


def section(folder: Path) -> str:
    path = FOLDER.parent.parent / "docs" / "measured.py"
    spec = importlib.util.spec_from_file_location("measured_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return "\n".join(module.section(folder))


def test_the_docs_say_what_is_owed_and_then_what_was_measured(tmp_path: Path) -> None:
    assert "the rows of a GPU are owed" in section(tmp_path)
    cases = [of_a_gpu(LLAMA, 10**12, factor=1.025), of_a_gpu(LLAMA, 10**12, outcome="out of memory")]
    (tmp_path / "somewhere.json").write_text(json.dumps({"schema_version": 1, "cases": cases}))
    text = section(tmp_path)
    assert "owed" not in text
    assert "attention by" not in text
    assert "estimates are for" not in text
    older = {"torch": "2.11.0+cu130", "transformers": "5.17.0"}
    cases = [one | {"environment": older | one["environment"], "attention": ["flash"]} for one in cases]
    cases[0]["attention"] = ["cudnn"]
    (tmp_path / "somewhere.json").write_text(json.dumps({"schema_version": 1, "cases": cases}))
    assert "attention by cudnn, flash" in section(tmp_path)
    assert "It ran with torch 2.11.0, transformers 5.17.0; estimates are for" in section(tmp_path)
    assert "### somewhere" in text
    assert "gpu a GPU" in text
    assert "| peak | 1 | 2.44% | -2.44% | 0, 1 | llama precision=bf16 seq_len=16 |" in text
    assert "Verdicts: 1 right; 1 said to fit and out of memory; 0 said not to fit and ran." in text
    assert "| 0.250 |" in text
    assert "| out of memory |" in text


def test_a_record_that_went_on_elsewhere_names_both_places(tmp_path: Path) -> None:
    cases = [of_a_gpu(LLAMA, 10**12), of_a_gpu(LLAMA, 10**12), of_a_gpu(LLAMA, 10**11)]
    cases[2]["environment"] |= {"gpu": "another", "torch": "2.11.0", "source": "torch 2.11.0"}
    (tmp_path / "two.json").write_text(json.dumps({"schema_version": 1, "cases": cases}))
    text = section(tmp_path)
    assert text.count("gpu a GPU") == text.count("gpu another") == 1
    assert text.index("gpu another") < text.index("It ran with torch 2.11.0")
    assert "source" not in text


@pytest.mark.parametrize(
    "made",
    [
        {"case": 3, "backend": "fake", "outcome": "measured"},
        {"case": {"model": "gpt2"}, "backend": "fake", "outcome": "measured"},
        {"case": {"model": "gpt2"}, "backend": "fake", "outcome": "measured", "environment": {}, "memory": [3],
         "communication": []},
        {"case": {"model": "gpt2"}, "backend": "fake", "outcome": "refused"},
        {"case": {"seq_len": 3}, "backend": "fake", "outcome": "refused", "why": "x"},
        {"outcome": "measured"},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_suite_has_recorded_is_refused(made: dict[str, Any], tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"schema_version": 1, "cases": [made]}))
    with pytest.raises(memcalc.InputError, match="holds cases that no suite has recorded"):
        read_record(record)

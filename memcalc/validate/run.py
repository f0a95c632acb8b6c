"""One case: the estimate, the measurement, both side by side. A suite: many of them, recorded as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from memcalc.errors import InputError, one_line, quoted
from memcalc.estimation import Report, estimate
from memcalc.inputs.files import read_json_object
from memcalc.validate.checks import BACKENDS, INSTALL, check
from memcalc.validate.comparison import Comparison, Measured

Case = Mapping[str, Any]
"""`model`, and options with underscores."""


def validate(model: Any, *, backend: str = "fake", **options: Any) -> Comparison:
    """Estimate a setup, run it, and put both side by side.

    InputError for what cannot be run, one line. Needs torch and transformers; `cuda` lets torch's OutOfMemoryError through.
    """
    report = estimate(model, **options)
    check(report, backend)
    measure = _measure(backend)
    if backend == "cuda":
        report = _on(report, model, options)
    return Comparison(report, measure(report), backend)


def _measure(backend: str) -> Callable[[Report], Measured]:
    """What measures; InputError where there is no such backend, no torch or no GPU."""
    if backend not in BACKENDS:
        raise InputError(f"--backend {one_line(backend)}: allowed: {', '.join(BACKENDS)}")
    try:
        if backend == "cuda":
            from memcalc.validate import cuda

            cuda.device_name()
            return cuda.measure
        from memcalc.validate import fake
    except ImportError as error:
        raise InputError(f"--backend {backend}: needs torch and transformers: {INSTALL} ({one_line(error)})") from None
    return fake.measure


def _on(report: Report, model: Any, options: dict[str, Any]) -> Report:
    """The same estimate for the GPU that is there, where memcalc knows it and none was named."""
    from memcalc.validate.cuda import device_name

    if report.gpu is not None:
        return report
    try:
        return estimate(model, **options, gpu=device_name())
    except InputError:
        return report


# --- suites


def read_suite(path: str) -> list[Case]:
    """A JSON document {"cases": [{"model": …, option: value, …}, …]}; `model` as for --model, or a config.json's fields."""
    cases: list[Case] = [*_cases_of(Path(path), "--suite")]
    for i, case in enumerate(cases):
        named = f"--suite {one_line(path)}: case {i + 1}"
        if not isinstance(case.get("model"), str | dict):
            raise InputError(f"{named}: field `model` is {quoted(case.get('model'))}; it should be a name or an object")
        if "backend" in case:
            raise InputError(f"{named}: field `backend` is the suite's; allowed: --backend")
    return cases


def _cases_of(path: Path, option: str) -> list[dict[str, Any]]:
    cases: object = read_json_object(path, option).get("cases")
    entries: list[object] = cast("list[object]", cases) if isinstance(cases, list) else []
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        shown = quoted(cast("object", cases)) if not entries else "a list that holds something else"
        raise InputError(f"{option} {one_line(path)}: field `cases` is {shown}; it should be a list of objects")
    return cast("list[dict[str, Any]]", entries)


def run_suite(
    cases: Sequence[Case], backend: str, record: Path | None, tell: Callable[[str], None], *, speaks: bool = True
) -> list[dict[str, Any]]:
    """Every case's document, in order. What `record` has measured is not run again; it is rewritten after every case.

    Of several ranks all but one do not speak: they run the same cases, and neither tell nor write.
    """
    _measure(backend)
    done = _recorded(record)
    if record is not None and speaks and not done:
        _write(record, [])
    out: list[dict[str, Any]] = []
    for i, case in enumerate(cases):
        key = _key(case, backend)
        made = done.get(key)
        if made is None or made["outcome"] not in ("measured", "out of memory"):
            made = {"case": dict(case), "backend": backend, **_outcome(case, backend)}
            done[key] = made
            if record is not None and speaks:
                _write(record, list(done.values()))
        out.append(made)
        if speaks:
            tell(f"{i + 1}/{len(cases)} {_name(case)}: {_said(made)}")
    return out


def _outcome(case: Case, backend: str) -> dict[str, Any]:
    """A case's document; nothing that happens in it ends the suite."""
    options = {name: value for name, value in case.items() if name != "model"}
    try:
        return {"outcome": "measured", **validate(case["model"], backend=backend, **options).to_dict()}
    except InputError as error:
        return {"outcome": "refused", "why": str(error)}
    except Exception as error:
        why = one_line(error, 300)
        outcome = "out of memory" if is_out_of_memory(error) else f"failed with {type(error).__name__}"
    if outcome != "out of memory":
        return {"outcome": outcome, "why": why}
    report = estimate(case["model"], **options)
    return {"outcome": outcome, "why": why, "predicted": {"device": report.device, "peak": report.peak}}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is torch's, which is not imported for it."""
    return isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError"


def _name(case: Case) -> str:
    model = case["model"]
    named = model if isinstance(model, str) else cast("dict[str, Any]", model).get("model_type", "config")
    return " ".join([one_line(named), *(f"{k}={v}" for k, v in case.items() if k != "model")])


def _said(made: dict[str, Any]) -> str:
    if made["outcome"] != "measured":
        return f"{made['outcome']}: {made['why']}"
    peak = next(row for row in made["memory"] if row["name"] == "peak")
    return f"peak predicted {peak['predicted']}, measured {peak['measured']}"


def _key(case: Case, backend: str) -> str:
    return json.dumps([case, backend], sort_keys=True)


def _recorded(record: Path | None) -> dict[str, dict[str, Any]]:
    if record is None or not record.exists():
        return {}
    document = read_json_object(record, "--record")
    if document.get("schema_version") != 1 or not isinstance(document.get("cases"), list):
        raise InputError(f"--record {one_line(record)}: is no record of a suite; allowed: a new file, or one")
    if not document["cases"]:
        return {}
    cases = _cases_of(record, "--record")
    if not all({"case", "backend", "outcome", "why"} & made.keys() >= {"case", "backend", "outcome"} for made in cases):
        raise InputError(f"--record {one_line(record)}: holds cases that no suite has recorded; allowed: a new file")
    return {_key(made["case"], made["backend"]): made for made in cases}


def _write(record: Path, cases: list[dict[str, Any]]) -> None:
    """All or nothing: a run that is killed while it writes leaves the last record."""
    text = json.dumps({"schema_version": 1, "cases": cases}, indent=1, ensure_ascii=False) + "\n"
    beside = record.with_name(record.name + ".new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(record)
    except OSError as error:
        raise InputError(
            f"--record {one_line(record)}: cannot be written ({one_line(error.strerror or error)})"
        ) from None

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
from memcalc.validate.comparison import Comparison

Case = Mapping[str, Any]
"""`model`, and options with underscores."""


def validate(model: Any, *, backend: str = "fake", **options: Any) -> Comparison:
    """Estimate a setup, run it, and put both side by side.

    InputError for what cannot be run, one line. Needs torch and transformers; `cuda` lets torch's OutOfMemoryError through.
    """
    if backend not in BACKENDS:
        raise InputError(f"--backend {one_line(backend)}: allowed: {', '.join(BACKENDS)}")
    report = estimate(model, **options)
    check(report, backend)
    try:
        if backend == "cuda":
            from memcalc.validate.cuda import device_name, measure

            report = _on(report, device_name(), model, options)
        else:
            from memcalc.validate.fake import measure
    except ImportError as error:
        raise InputError(f"--backend {backend}: needs torch and transformers: {INSTALL} ({one_line(error)})") from None
    return Comparison(report, measure(report), backend)


def _on(report: Report, gpu: str, model: Any, options: dict[str, Any]) -> Report:
    """The same estimate for the GPU that is there, where memcalc knows it and none was named."""
    if report.gpu is not None:
        return report
    try:
        return estimate(model, **options, gpu=gpu)
    except InputError:
        return report


# --- suites


def read_suite(path: str) -> list[Case]:
    """A JSON document {"cases": [{"model": …, option: value, …}, …]}; `model` as for --model, or a config.json's fields."""
    document = read_json_object(Path(path), "--suite")
    cases: object = document.get("cases")
    if not isinstance(cases, list) or not cases:
        shown = quoted(cast("object", cases))
        raise InputError(f"--suite {one_line(path)}: field `cases` is {shown}; it should be a list of setups")
    for i, case in enumerate(cast("list[object]", cases)):
        if not isinstance(case, dict) or "model" not in cast("dict[str, Any]", case):
            raise InputError(
                f"--suite {one_line(path)}: case {i + 1} is {quoted(cast('object', case))}; it should be an object with a model"
            )
    return cast("list[Case]", cases)


def run_suite(
    cases: Sequence[Case], backend: str, record: Path | None, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every case's document, in order. What `record` has already is not run again; it is rewritten after every case."""
    done = _recorded(record)
    out: list[dict[str, Any]] = []
    for i, case in enumerate(cases):
        key = _key(case, backend)
        made = done.get(key)
        if made is None:
            made = {"case": dict(case), "backend": backend, **_outcome(case, backend)}
            done[key] = made
            if record is not None:
                _write(record, list(done.values()))
        out.append(made)
        tell(f"{i + 1}/{len(cases)} {_name(case)}: {_said(made)}")
    return out


def _outcome(case: Case, backend: str) -> dict[str, Any]:
    options = {name: value for name, value in case.items() if name != "model"}
    try:
        return {"outcome": "measured", **validate(case["model"], backend=backend, **options).to_dict()}
    except InputError as error:
        return {"outcome": "refused", "why": str(error)}
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _forget()
        report = estimate(case["model"], **options)
        predicted = {"device": report.device, "peak": report.peak}
        return {"outcome": "out of memory", "why": one_line(error, 300), "predicted": predicted}


def _forget() -> None:
    """Give back what a failed case holds, so that the next one can run."""
    import gc

    from memcalc.validate.cuda import torch

    gc.collect()
    torch.cuda.empty_cache()


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
    cases = cast("list[dict[str, Any]]", read_json_object(record, "--record").get("cases", []))
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

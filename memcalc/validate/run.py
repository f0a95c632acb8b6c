"""One case: the estimate, the measurement, and both side by side."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from memcalc.errors import InputError, one_line
from memcalc.estimation.estimate import estimate
from memcalc.estimation.report import Report
from memcalc.validate.checks import BACKENDS, INSTALL, check
from memcalc.validate.comparison import Comparison, Measured, predicted_memory
from memcalc.validate.gpus import known
from memcalc.validate.special import check_special
from memcalc.validate.suites import Case, model_of, options_of


def validate(model: Any, *, backend: str = "fake", **options: Any) -> Comparison:
    """Estimate a setup, run it, and put both side by side.

    Raises InputError, one line, for a setup that cannot be run. It needs torch and transformers. `cuda` lets torch's
    OutOfMemoryError through.
    """
    report = estimate(model, **options)
    check_special(report, backend)
    check(report, backend)
    measure = measurer(backend)
    if backend == "cuda":
        from memcalc.validate.place import place

        report = on_gpu(model, options, place().name)
    return Comparison(report, measure(report), backend)


def measurer(backend: str) -> Callable[[Report], Measured]:
    """Return the function that measures. Raises InputError without such a backend, torch or a GPU."""
    if backend not in BACKENDS:
        raise InputError(f"--backend {one_line(backend)}: allowed: {', '.join(BACKENDS)}")
    try:
        if backend == "cuda":
            from memcalc.validate import cuda
            from memcalc.validate.place import place

            place()
            return cuda.measure
        from memcalc.validate import fake
    except ImportError as error:
        raise InputError(f"--backend {backend}: needs torch and transformers: {INSTALL} ({one_line(error)})") from None
    return fake.measure


def on_gpu(model: Any, options: dict[str, Any], name: str) -> Report:
    """Return the estimate for the GPU of this run, if memcalc knows it and no other was named."""
    return estimate(model, **(options if options.get("gpu") is not None else {**options, "gpu": known(name)}))


def outcome(case: Case, backend: str) -> dict[str, Any]:
    """Return a case of a suite as its record has it. No exception of the case gets out."""
    try:
        return {"outcome": "measured", **validate(model_of(case), backend=backend, **options_of(case)).to_dict()}
    except InputError as error:
        return {"outcome": "refused", "why": str(error)}
    except Exception as error:
        why = one_line(error, 300)
        if not is_out_of_memory(error):
            return {"outcome": f"failed with {type(error).__name__}", "why": f"{why} ({place_of(error)})"}
    return {"outcome": "out of memory", "why": why, **_too_large(case)}


def _too_large(case: Case) -> dict[str, Any]:
    """Return where memory ran out, and what had been predicted."""
    from memcalc.validate.place import place

    environment = place().environment()
    report = on_gpu(model_of(case), options_of(case), environment["gpu"])
    predicted = predicted_memory(report, "cuda", environment, real_ranks=False)
    return {"environment": environment, "predicted": {name: predicted[name] for name in ("peak", "reserved", "device")}}


def place_of(error: BaseException) -> str:
    """Return where an error was raised: the last line of memcalc on the way there, and the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _short(frame.filename).startswith("memcalc/")]
    last = dict.fromkeys(f"{_short(frame.filename)}:{frame.lineno}" for frame in (*own[-1:], *frames[-1:]))
    return ", ".join(last)


def _short(filename: str) -> str:
    """Return a file's path from the package on."""
    here = str(Path(__file__).resolve().parent.parent.parent) + os.sep
    return filename.removeprefix(here).rpartition("site-packages" + os.sep)[2]


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is torch's out of memory, which is recognized without importing torch, or that of a library
    that asks the device itself."""
    if not isinstance(error, RuntimeError):
        return False
    return type(error).__name__ == "OutOfMemoryError" or _OUT_OF_MEMORY.search(str(error)) is not None


_OUT_OF_MEMORY: Final = re.compile("(?i:cuda) [^\n]*out of memory|_STATUS_ALLOC_FAILED")
"""Matches the messages of the CUDA runtime and its driver, NCCL, cuBLAS and cuDNN, which do not ask the caching
allocator."""

"""`memcalc.estimate`: the report of one setup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memcalc.core.collector import without_collections
from memcalc.errors import InputError
from memcalc.estimation.report import Report
from memcalc.formats.given import naming_files, with_files
from memcalc.inputs.model import Model, load_model
from memcalc.inputs.options import Options, check_options
from memcalc.setup.resolved import resolve

if TYPE_CHECKING:
    import os

    from memcalc.inputs.file_options import FromFiles


@without_collections()
def estimate(
    model: str | os.PathLike[str] | Mapping[str, Any] | Model | None = None,
    *,
    params: int | str | None = None,
    **options: Any,
) -> Report:
    """Return the report of one training step, per GPU.

    Give `model` as for `load_model`; or `params`, a bare number of parameters ("7.5B"), for model states alone. `options`
    are the command line's, with underscores. `deepspeed`, `accelerate`, `training_args`, `megatron_args` and `torchtitan` take
    a file's path or its parsed mapping, which may name the model too. Raise InputError (a ValueError) with one line that says
    what is wrong.
    """
    if params is not None and options.get("layers") is not None:
        raise InputError("--layers: is a model, and so is --params; give one of them")
    model, options, files = with_files(model, options)
    if files is not None and params is not None:
        model = None
    checked = check_options(options)
    if (model is None) == (params is None):
        raise InputError("--model or --params: exactly one of them is needed; as in: memcalc estimate --model llama-7b")
    if model is None:
        from memcalc.estimation.sizing import SizeOnly, check_decides, parse_params

        size = SizeOnly(parse_params(params))
        check_decides(options)
        return Report(size, resolve(checked, None), given=options, files=files)
    loaded = load_model(model)
    loaded.check_step()
    if files is None:
        return _report(loaded, checked, options, None)
    with naming_files(files):
        return _report(loaded, checked, options, files)


def _report(model: Model, checked: Options, options: dict[str, Any], files: FromFiles | None) -> Report:
    report = Report(model, resolve(checked, model), given=options, files=files)
    if (report.setup.engine, report.setup.zero, report.setup.recompute) == ("deepspeed", 3, "op"):
        _ = report.peak  # the run shows whether torch accepts what DeepSpeed does in it, and raises if not
    return report

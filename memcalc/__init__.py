"""memcalc estimates the GPU memory, the communication and the FLOPs of a transformer's training step, without a GPU.

    import memcalc
    model = memcalc.load_model("llama-7b")
    report = memcalc.estimate(model, gpus=8, zero=3)
    report.to_dict()

The names are imported when they are first used, so that the command line starts fast.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.decisions.compare import Compared, compare
    from memcalc.errors import InputError
    from memcalc.estimation.emitted import emit
    from memcalc.estimation.estimate import estimate
    from memcalc.estimation.many.question import Many, many
    from memcalc.estimation.report import Report
    from memcalc.formats.layers import load_layers
    from memcalc.formats.written import Written
    from memcalc.inference.infer import infer
    from memcalc.inference.report import Inferred
    from memcalc.inputs.model import Model, load_model
    from memcalc.planning.plan import plan
    from memcalc.planning.result import Plans

__version__ = "0.1.0"
__all__ = [
    "Compared", "Inferred", "InputError", "Many", "Model", "Plans", "Report", "Written", "__version__",
    "compare", "emit", "estimate", "infer", "load_layers", "load_model", "many", "plan",
]  # fmt: skip

_HOMES = {
    "Compared": "memcalc.decisions.compare",
    "Inferred": "memcalc.inference.report",
    "InputError": "memcalc.errors",
    "Many": "memcalc.estimation.many.question",
    "Model": "memcalc.inputs.model",
    "Plans": "memcalc.planning.result",
    "Report": "memcalc.estimation.report",
    "Written": "memcalc.formats.written",
    "compare": "memcalc.decisions.compare",
    "emit": "memcalc.estimation.emitted",
    "estimate": "memcalc.estimation.estimate",
    "infer": "memcalc.inference.infer",
    "load_layers": "memcalc.formats.layers",
    "load_model": "memcalc.inputs.model",
    "many": "memcalc.estimation.many.question",
    "plan": "memcalc.planning.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memcalc' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value

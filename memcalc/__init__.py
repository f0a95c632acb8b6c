"""memcalc: what a transformer's training step needs, per GPU, before anyone books one.

    import memcalc
    model = memcalc.load_model("llama-7b")
    report = memcalc.estimate(model, gpus=8, zero=3)
    report.to_dict()
"""

from memcalc.errors import InputError
from memcalc.estimate import Report, estimate
from memcalc.inputs.model import Model, load_model

__version__ = "0.1.0"
__all__ = ["InputError", "Model", "Report", "__version__", "estimate", "load_model"]

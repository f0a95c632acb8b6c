"""The table of `accelerate estimate-memory` (Hugging Face's model-memory calculator), and the exact one beside it.

accelerate counts the model that AutoModel makes, which has no output head, in fp32 with its buffers, and divides by 2, 4 and
8: every weight is quantised, and no scale is counted (accelerate/commands/estimate.py). "Training using Adam" is four times the
fp32 weights for float32, and twice for 16 bits. The exact numbers are those of the model with its head, quantised as
bitsandbytes does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import numel
from memcalc.core.dtypes import bf16, boolean, fp16, fp32
from memcalc.inference.quantised_methods import method_of
from memcalc.inference.quantised_places import is_modelled, numbered
from memcalc.inference.weights import rows_by_weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Weight
    from memcalc.inference.weights import Method
    from memcalc.inputs.model import Model

_FP32: Final = 4
_ADAM: Final = 16
"""Bytes a parameter with Adam: fp32 weights, gradients and two moments, or 16-bit weights and gradients with fp32 masters and
two moments."""
_LEAVES: Final = frozenset({"biogpt", "ctrl", "openai-gpt"})
"""The types that name no layer in `_no_split_modules`: accelerate then looks at the layers' own leaves."""
_NO_BASE: Final = frozenset(
    {
        "bert", "camembert", "data2vec-text", "deberta-v2", "electra", "ernie", "megatron-bert", "modernbert", "resnet",
        "roberta", "roc_bert", "xlm-roberta", "zamba2",
    }
)  # fmt: skip
"""Types whose AutoModel has other weights than the model here: a pooler, or shared blocks that are counted again."""
_TABLES: Final = {"bart": 2, "t5": 2}
"""The tables of the encoder and the decoder, which accelerate counts beside the shared one, by type."""
_BF16: Final = frozenset({("recurrent_gemma", "model.normalizer")})
"""Buffers that are bf16 whatever the model is."""
_OF_HEAD: Final = frozenset({"final_logits_bias"})
"""Buffers that AutoModel has not."""
_SHARES: Final = {"fp32": 1, "fp16": 2, "bf16": 2, "int8": 4, "int4": 8}


class Sizes(NamedTuple):
    """A line of a table, in bytes. accelerate's are fractions if a buffer is of bools, which it counts as bits."""

    largest_layer: float
    total: float
    training: float | None
    """The bytes of training with Adam, without activations; None for weights that do not train."""


class Line(NamedTuple):
    """A dtype: what accelerate says, and the exact bytes."""

    dtype: str
    accelerate: Sizes | None
    """None for types whose AutoModel is another model."""
    exact: Sizes | None
    """None where the layers that are quantised are not known."""


def dtype_table(model: Model) -> tuple[Line, ...]:
    """Return the lines for fp32, fp16, bf16, int8 and int4. Exact int8 is bitsandbytes', exact int4 its nf4."""
    of_accelerate = None if model.model_type in _NO_BASE or model.program.source else _accelerate(model)
    lines: list[Line] = []
    for dtype, share in _SHARES.items():
        said = None
        if of_accelerate is not None:
            training = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}.get(dtype)
            largest, total = of_accelerate
            said = Sizes(largest / share, total / share, None if training is None else training * total)
        lines.append(Line(dtype, said, _exact(model, dtype)))
    return tuple(lines)


def _exact(model: Model, dtype: str) -> Sizes | None:
    trains = {"fp32": fp32, "fp16": fp16, "bf16": bf16}
    if dtype in trains:
        return _sizes(model, trains[dtype], None, _ADAM * model.num_parameters)
    if not is_modelled(model):
        return None
    return _sizes(model, bf16, method_of("int8" if dtype == "int8" else "nf4", bf16, None), None)


def _sizes(model: Model, dtype: DType, method: Method | None, training: int | None) -> Sizes:
    layers: dict[str, int] = defaultdict(int)
    total = 0
    for weight, row in rows_by_weight(model, dtype, method):
        layers[_unit(weight)] += row.nbytes
        total += row.nbytes
    return Sizes(max(layers.values(), default=0), total, training)


def _unit(weight: Weight) -> str:
    """Return what a weight is a part of: its layer, or its module outside the layers."""
    if weight.layer is None:
        return weight.name.rpartition(".")[0]
    return numbered((weight.name[: weight.name.index("*") + 1], weight.layer))


# --- accelerate's own way


def _accelerate(model: Model) -> tuple[float, float]:
    """Return the largest layer and the total of the fp32 model without its head (accelerate/utils/modeling.py,
    get_max_layer_size)."""
    head = model.program.unembedding
    weights = [w for w in model.program.weights() if w.name.rpartition(".")[0] != head]
    buffers = list(_buffers(model))
    units: dict[str, float] = defaultdict(float)
    for name, nbytes in _named(model, weights, buffers):
        units[name] += nbytes
    tables = (numel(w.shape)[0] for w in weights if w.name.removeprefix("model.").startswith("shared."))
    again = _TABLES.get(model.model_type, 0) * sum(tables)
    total = _FP32 * (sum(numel(w.shape)[0] for w in weights) + again) + sum(nbytes for _, nbytes in buffers)
    return max(units.values(), default=0.0), total


def _named(model: Model, weights: list[Weight], buffers: list[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Yield the bytes of every tensor with the name of the module that it counts for. Tensors of modules that have modules
    of their own are in none."""
    tensors = [(numbered((w.name, w.layer)), w.layer is not None, _FP32 * numel(w.shape)[0]) for w in weights]
    of_layers = {numbered((w.name[: w.name.index("*") + 1], w.layer)) for w in weights if w.layer is not None}
    tensors += [(name, _layer_of(name, of_layers) is not None, nbytes) for name, nbytes in buffers]
    parents = {path.rpartition(".")[0] for path in _paths(name for name, _, _ in tensors)}
    for name, in_layer, nbytes in tensors:
        layer = _layer_of(name, of_layers) if in_layer else None
        path = name.rpartition(".")[0]
        if layer is not None and model.model_type not in _LEAVES:
            yield layer, nbytes
        elif path not in parents:
            yield path, nbytes


def _paths(names: Iterable[str]) -> set[str]:
    """Return the modules that tensors are in, and the modules that these are in."""
    found: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        while path:
            found.add(path)
            path = path.rpartition(".")[0]
    return found


def _layer_of(name: str, layers: set[str]) -> str | None:
    parts = name.split(".")
    return next((path for i in range(len(parts)) if (path := ".".join(parts[:i])) in layers), None)


def _buffers(model: Model) -> Iterator[tuple[str, float]]:
    """Yield the registered buffers of a new model: name and bytes, a bool as a bit."""
    for buffer in model.program.buffers():
        if buffer.registered and buffer.name not in _OF_HEAD:
            dtype = bf16 if (model.model_type, buffer.name) in _BF16 else buffer.dtype or fp32
            itemsize = 1 / 8 if dtype is boolean else dtype.itemsize
            yield buffer.full_name, itemsize * numel(buffer.shape)[0]

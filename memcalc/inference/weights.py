"""The bytes of a model's weights on one GPU, as a method of quantisation stores them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dtypes import fp32
from memcalc.core.rows import Row
from memcalc.errors import InputError
from memcalc.families.base.replacing import Stored
from memcalc.inference.quantised_formats import FP8
from memcalc.inference.quantised_places import CONV1D, RULES, Rule, experts_quantised, is_modelled, linear_places

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.core.dims import Dim
    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Basis
    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import Weight
    from memcalc.families.base.program import Program
    from memcalc.inference.quantised_formats import Format
    from memcalc.inputs.model import Model


class Method(NamedTuple):
    """A method of quantisation, ready to be used for a model."""

    name: str
    """The name for messages: the value of --quantize, or of `quant_method`."""
    format: Format
    rule: Rule
    left_out: tuple[str, ...] | None = None
    """The modules that a configuration leaves out; None: it says nothing, and the output head stays."""
    only: tuple[str, ...] | None = None
    """The ends of the names of the only modules that are quantised; None: all."""
    notes: tuple[str, ...] = ()


_SERVED: Final = "the engine's own fused experts (vLLM fused_moe, SGLang fused_moe_triton), in the checkpoint's layout"


def served(method: Method) -> Method:
    """Return the method as vLLM and SGLang load it: they quantise the experts too, whatever transformers does, and keep the
    scales of tensors and of outputs in fp32 (compressed_tensors/schemes of vLLM)."""
    if isinstance(method.format, FP8):
        method = method._replace(format=method.format._replace(scale=fp32))
    if method.rule is RULES["bitsandbytes"] or method.rule.experts:
        return method
    return method._replace(rule=method.rule._replace(experts=True, source=f"{method.rule.source}; experts: {_SERVED}"))


def weight_rows(model: Model, dtype: DType, method: Method | None, program: Program | None = None) -> tuple[Row, ...]:
    """Return the rows of a model's weights: those of quantised layers as the method stores them, all others in `dtype`.

    `program` is that of one tensor-parallel rank; its weights are packed after they are cut, as vLLM makes them. Raises
    InputError if a weight does not fit the method.
    """
    return tuple(_counted(row for _, row in rows_by_weight(model, dtype, method, program)))


def rows_by_weight(
    model: Model,
    dtype: DType,
    method: Method | None,
    program: Program | None = None,
    weights: Iterable[Weight] | None = None,
) -> Iterator[tuple[Weight, Row]]:
    """Yield every weight with each row of what holds it, as `weight_rows` counts them. `weights`: those of the rank, if they are
    not the program's."""
    if method is not None and not is_modelled(model):
        raise InputError(
            f"--quantize {method.name}: for a {model.model_type} the linear layers are not all known, so this is not modelled; "
            "allowed: none"
        )
    places: frozenset[Place] = frozenset()
    if method is not None:
        places = linear_places(model, method.rule, method.left_out)
    is_conv1d = model.model_type in CONV1D
    own = program or model.program
    yield from _rows(own, own.weights() if weights is None else weights, dtype, method, places, is_conv1d)


def _counted(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield equal rows once, with their number."""
    first: dict[tuple[object, ...], Row] = {}
    copies: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        key = row.name, tuple(dim.size for dim in row.shape), row.dtype
        first.setdefault(key, row)
        copies[key] += 1
    for key, row in first.items():
        yield row._replace(copies=copies[key])


def _rows(
    program: Program,
    weights: Iterable[Weight],
    dtype: DType,
    method: Method | None,
    places: frozenset[Place],
    is_conv1d: bool,
) -> Iterator[tuple[Weight, Row]]:
    read = program.source or program.weights_source
    for weight in weights:
        stored = None if method is None else _stored(weight, method, places, is_conv1d)
        if stored is None or method is None:
            own = _bias_dtype(weight, method) or weight.dtype or dtype
            yield weight, Row("parameters", weight.name, weight.shape, own, basis=program.basis, source=read)
            continue
        basis: Basis = "modelled" if weight.component == "experts" and method.rule.source.endswith(_SERVED) else "exact"
        for one in stored:
            name = _named(weight.name, one.name)
            yield weight, Row("parameters", name, one.shape, one.dtype, basis=basis, source=method.format.source)


def _stored(weight: Weight, method: Method, places: frozenset[Place], is_conv1d: bool) -> tuple[Stored, ...] | None:
    """Return the tensors that hold a weight; None if it stays. A Conv1D's weight is (in, out)."""
    path, _, name = weight.name.rpartition(".")
    is_linear = name == "weight" and (path, weight.layer) in places and _chosen(path, method)
    stacked = experts_quantised(weight, method.rule, method.left_out)
    if not is_linear and not stacked:
        return None
    try:
        if is_linear:
            out, fan_in = reversed(weight.shape) if is_conv1d and weight.layer is not None else weight.shape
            return method.format.stored(out, fan_in)
        out, fan_in = _out_and_in(weight)
        return method.format.stacked(weight.shape[0], out, fan_in, 2 if name.startswith("gate_up") else 1)
    except ValueError as error:
        raise InputError(f"--quantize {method.name}: {weight.name}: {error}") from None


def _bias_dtype(weight: Weight, method: Method | None) -> DType | None:
    """Return the dtype of an expert's bias, where it is not the model's."""
    is_bias = weight.component == "experts" and weight.name.endswith("_bias")
    return method.rule.expert_bias if method is not None and is_bias else None


def _chosen(path: str, method: Method) -> bool:
    return method.only is None or any(path.endswith(one) for one in method.only)


def _out_and_in(weight: Weight) -> tuple[Dim, Dim]:
    """Return the sizes of an expert's matrix. Some models keep it transposed: (in, out)."""
    _, first, last = weight.shape
    is_first = not weight.name.endswith("down_proj")
    transposed = (first.name == "hidden") if is_first else (last.name == "hidden")
    return (last, first) if transposed else (first, last)


def _named(weight: str, part: str) -> str:
    """Return a tensor's name as its library has it: `q_proj.qweight`, `q_proj.weight_scale`, `gate_up_proj_scale_inv`."""
    if not part or part.startswith("."):
        return weight + part
    path, _, name = weight.rpartition(".")
    if name != "weight":
        return f"{weight}_{part}"
    return f"{path}.{part}" if part in _OWN_NAMES else f"{weight}_{part}"


_OWN_NAMES: Final = frozenset(
    {"qweight", "qzeros", "scales", "g_idx", "activation_scale", "input_scale", "input_global_scale", "SCB"}
)

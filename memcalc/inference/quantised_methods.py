"""The values of --quantize, and what a `quantization_config` in a config.json says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from memcalc.core.dtypes import bf16, fp16, fp32, int8, uint8
from memcalc.errors import InputError, quoted
from memcalc.inference.quantised_formats import AWQ, FP8, GPTQ, MXFP4, NVFP4, BlockFP8, FourBit, Int8, Packed
from memcalc.inference.quantised_places import RULES
from memcalc.inference.weights import Method

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memcalc.core.dtypes import DType

KINDS: Final = ("none", "fp8", "int8", "nf4", "fp4", "int4", "gptq", "awq", "mxfp4")
"""The values of --quantize."""
GROUP_SIZES: Final = (16, 32, 64, 128, 256, 512, 1024, -1)
"""The values of --group-size."""
DEFAULT_GROUP: Final = 128
_GROUPED: Final = ("int4", "gptq", "awq")
_SCALES: Final = {"fp32": fp32, "bf16": bf16, "fp16": fp16}
_BLOCK: Final = (128, 128)


def method_of(kind: str, dtype: DType, group_size: int | None, *, double_quant: bool = False) -> Method | None:
    """Return the method that --quantize names; None for "none". `dtype` is the model's. Raises InputError for an unknown value,
    or options of another method."""
    if kind not in KINDS:
        raise InputError(f"--quantize {kind}: expected one of {', '.join(KINDS)}")
    if group_size is not None and kind not in _GROUPED:
        raise InputError(f"--group-size {group_size}: is an option of --quantize {', '.join(_GROUPED)}")
    if group_size is not None and group_size not in GROUP_SIZES:
        raise InputError(f"--group-size {group_size}: expected one of {', '.join(map(str, GROUP_SIZES))}")
    if double_quant and kind not in ("nf4", "fp4"):
        raise InputError("--double-quant on: is an option of --quantize nf4, fp4")
    group = DEFAULT_GROUP if group_size is None else group_size
    match kind:
        case "none":
            return None
        case "fp8":
            return Method(kind, BlockFP8(_BLOCK), RULES["fp8"])
        case "int8":
            return Method(kind, Int8(), RULES["bitsandbytes"])
        case "nf4" | "fp4":
            return Method(kind, FourBit(double_quant), RULES["bitsandbytes"])
        case "int4":
            return Method(kind, Packed(4, group, dtype), RULES["compressed-tensors"])
        case "gptq":
            return Method(kind, GPTQ(4, group), RULES["gptq"])
        case "mxfp4":
            return Method(kind, MXFP4(), RULES["mxfp4"], ())
        case _:
            return Method(kind, AWQ(4, group), RULES["awq"])


def method_of_config(said: Mapping[str, Any], dtype: DType) -> Method:
    """Return the method that a `quantization_config` describes. Raises InputError for one that is not modelled."""
    method = str(said.get("quant_method") or "bitsandbytes").lower()
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _compressed,
        "mxfp4": _mxfp4,
    }
    if method not in readers:
        _refuse("quant_method", method, ", ".join(readers))
    return readers[method](said, dtype)


def _gptq(said: Mapping[str, Any], dtype: DType) -> Method:
    bits = _number(said, "bits", 4)
    if bits not in (2, 3, 4, 8):
        _refuse("bits", bits, "2, 3, 4, 8")
    inside = said.get("modules_in_block_to_quantize")
    only = None if inside is None else tuple(str(name) for names in inside for name in names)
    notes = ("gptq: g_idx orders the inputs by activation (desc_act)",) if said.get("desc_act") else ()
    made = Method("gptq", GPTQ(bits, _group(said, "group_size")), RULES["gptq"], None, only, notes)
    if said.get("lm_head"):
        _refuse("lm_head", True, "false")
    return made


def _awq(said: Mapping[str, Any], dtype: DType) -> Method:
    bits = _number(said, "w_bit" if "w_bit" in said else "bits", 4)
    if bits != 4:
        _refuse("bits", bits, "4")
    version = str(said.get("version") or said.get("format") or "gemm").lower()
    if version != "gemm":
        _refuse("version", version, "gemm")
    size = _group(said, "q_group_size" if "q_group_size" in said else "group_size")
    left_out = _names(said, "modules_to_not_convert")  # besides the output head (add_default_skips)
    return Method("awq", AWQ(bits, size), RULES["awq"], None if left_out is None else (*left_out, "lm_head"))


def _fp8(said: Mapping[str, Any], dtype: DType) -> Method:
    block = said.get("weight_block_size", _BLOCK)
    if said.get("expert_dtype", "fp8") != "fp8":
        _refuse("expert_dtype", said["expert_dtype"], "fp8")
    if said.get("dequantize"):
        _refuse("dequantize", True, "false")
    sizes = None if block is None else _pair(block)
    scale = uint8 if said.get("scale_fmt") == "ue8m0" else fp32
    left_out = _names(said, "modules_to_not_convert")
    if left_out is None:
        left_out = _names(said, "ignored_layers")
    static = said.get("activation_scheme", "dynamic") == "static"
    return Method("fp8", BlockFP8(sizes, scale, static), RULES["fp8"], left_out or None)


def _bitsandbytes(said: Mapping[str, Any], dtype: DType) -> Method:
    left_out = _names(said, "llm_int8_skip_modules")
    if bool(said.get("load_in_8bit")) == bool(said.get("load_in_4bit")):
        _refuse("load_in_4bit", said.get("load_in_4bit"), "true, or load_in_8bit true, one of them")
    if said.get("llm_int8_has_fp16_weight"):
        _refuse("llm_int8_has_fp16_weight", True, "false")
    if said.get("load_in_8bit"):
        return Method("int8", Int8(), RULES["bitsandbytes"], left_out)
    kind = said.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        _refuse("bnb_4bit_quant_type", kind, "nf4, fp4")
    return Method(str(kind), FourBit(bool(said.get("bnb_4bit_use_double_quant"))), RULES["bitsandbytes"], left_out)


def _mxfp4(said: Mapping[str, Any], dtype: DType) -> Method:
    if said.get("dequantize"):
        _refuse("dequantize", True, "false")
    left_out = tuple(name for name in _names(said, "modules_to_not_convert") or ())
    return Method("mxfp4", MXFP4(), RULES["mxfp4"], left_out)


def _compressed(said: Mapping[str, Any], dtype: DType) -> Method:
    given: object = said.get("config_groups") or {}
    schemes = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if len(schemes) != 1:
        _refuse("config_groups", cast("object", given), "one group")
    scheme: Mapping[str, Any] = next(iter(schemes.values()))
    targets = scheme.get("targets") or ["Linear"]
    if list(targets) != ["Linear"]:
        _refuse("targets", targets, "['Linear']")
    weights: Mapping[str, Any] = scheme.get("weights") or {}
    inputs: Mapping[str, Any] = scheme.get("input_activations") or {}
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy") or "tensor"
    static = bool(inputs) and not inputs.get("dynamic")
    ignored = tuple(_pattern(name) for name in cast("Sequence[str]", said.get("ignore") or ()))
    rule, name = RULES["compressed-tensors"], "compressed-tensors"
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel", "block"):
        sizes = _pair(weights.get("block_structure") or _BLOCK)
        return Method(name, FP8(strategy, dtype, sizes, static), rule, ignored)
    if kind == "int" and bits == 8 and inputs and strategy in ("tensor", "channel"):
        return Method(name, FP8(strategy, dtype, _BLOCK, static, code=int8), rule, ignored)
    if kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        size = _group(weights, "group_size") if strategy == "group" else -1
        return Method(name, Packed(bits, size, dtype, bool(weights.get("symmetric", True))), rule, ignored)
    if kind == "float" and bits == 4 and strategy == "tensor_group":
        return Method(name, NVFP4(has_input_scale=bool(inputs) and inputs.get("dynamic") is not True), rule, ignored)
    return _refuse("weights", dict(weights), "8-bit float, 8-bit int, 4-bit int, NVFP4")


def _pattern(name: str) -> str:
    """Return a name of `ignore` as a pattern: those of compressed-tensors that begin with "re:" are regular expressions."""
    return name.removeprefix("re:")


def _names(said: Mapping[str, Any], field: str) -> tuple[str, ...] | None:
    given: object = said.get(field)
    if given is None:
        return None
    names = cast("list[object]", given) if isinstance(given, (list, tuple)) else [None]
    if not all(isinstance(one, str) for one in names):
        _refuse(field, cast("object", given), "a list of names")
    return tuple(cast("list[str]", names))


def _number(said: Mapping[str, Any], field: str, default: int) -> int:
    given: object = said.get(field, default)
    if not isinstance(given, int) or isinstance(given, bool):
        _refuse(field, given, "a number")
    return given


def _group(said: Mapping[str, Any], field: str) -> int:
    size = _number(said, field, DEFAULT_GROUP)
    if size != -1 and size < 1:
        _refuse(field, size, "a number of inputs, or -1")
    return size


def _pair(given: object) -> tuple[int, int]:
    sizes = cast("list[object]", given) if isinstance(given, (list, tuple)) else []
    rows, columns = sizes if len(sizes) == 2 else (0, 0)
    if not isinstance(rows, int) or not isinstance(columns, int) or rows < 1 or columns < 1:
        _refuse("weight_block_size", cast("object", given), "two positive numbers, or null")
    return rows, columns


def _refuse(field: str, value: object, allowed: str) -> NoReturn:
    raise InputError(
        f"--model: field `quantization_config.{field}` is {quoted(value)}, which is not modelled; allowed: {allowed}"
    )

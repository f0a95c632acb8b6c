"""The notation of layers: a mapping of `input`, `layers` and `loss`, as in docs/layers.md.

A layer is a name (`flatten`), a name with its main option (`linear: 4096`) or with several (`conv2d: {out: 64, kernel:
3}`), or a line of nn.Sequential's repr (`Conv2d(3, 64, kernel_size=(3, 3))`). Everything else is refused with its
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, cast, get_type_hints

from memcalc.core.dims import Dim
from memcalc.errors import nearest, one_line, quoted
from memcalc.families.base.first_problem import first_problem
from memcalc.families.base.layers.kinds import by_torch_name, kinds
from memcalc.families.base.layers.network import Chain, Concat, Entry, One, Repeated, Residual
from memcalc.families.base.layers.torch_lines import Called, is_call, parse_call, parse_repr

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.families.base.layers.layer import Layer

LOSSES: Final = {
    "cross-entropy": "cross-entropy", "cross_entropy": "cross-entropy", "crossentropyloss": "cross-entropy",
    "crossentropyloss()": "cross-entropy", "mse": "mse", "mseloss": "mse", "mseloss()": "mse",
}  # fmt: skip
KEYS: Final = ("model_type", "name", "input", "layers", "loss", "cudnn")
_DEEPEST: Final = 16
"""The most composites inside each other."""
_MOST_LAYERS: Final = 10_000
"""The most layers after repeats are written out."""
_LARGEST: Final = 10**6
"""The largest dim of an input."""
_PLACES: Final[Mapping[int, Sequence[str]]] = {
    1: ("features",), 2: ("length", "features"), 3: ("channels", "height", "width"), 4: ("channels", "depth", "height", "width"),
}  # fmt: skip


class Given(NamedTuple):
    """A network as a file says it."""

    shape: Shape
    """The input without the batch. A dim named "seq" is as long as --seq-len says."""
    integers: bool
    chain: Chain
    loss: str
    cudnn: bool = True
    """False if the caller runs recurrent layers without cuDNN (torch.backends.cudnn.enabled = False)."""


def read_network(content: Mapping[str, Any]) -> Given:
    """Return what a file says. Raises ValueError: the place, the value, what is allowed."""
    for key in content:
        if key not in KEYS:
            close = nearest(str(key), KEYS, most=1)
            hint = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(KEYS[1:])}"
            raise ValueError(f"{one_line(key)}: unknown key; {hint}")
    shape, integers = _input(content)
    if "layers" not in content:
        raise ValueError("layers: missing; expected a list, such as [{linear: 10}]")
    return Given(
        shape,
        integers,
        _Reader().chain(content["layers"], "layer", 1),
        _loss(content.get("loss", "cross-entropy")),
        _cudnn(content.get("cudnn", True)),
    )


def _cudnn(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"cudnn {quoted(value)}: expected true or false")
    return value


def _input(content: Mapping[str, Any]) -> tuple[Shape, bool]:
    """Return the shape of the input without the batch, and whether it is ids."""
    allowed = "allowed: [channels, height, width], [features], [seq, features], tokens, {ids: [length]}"
    given = content.get("input")
    if given is None:
        raise ValueError(f"input: missing; {allowed}")
    if given == "tokens":
        return (seq_dim(),), True
    if isinstance(given, Mapping):
        held = cast("Mapping[str, Any]", given)
        if set(held) != {"ids"}:
            raise ValueError(f"input {quoted(dict(held))}: {allowed}")
        return _dims(held["ids"], "input.ids", allowed), True
    return _dims(given, "input", allowed), False


def seq_dim() -> Dim:
    return Dim("seq", 1, (0, 1, 0, 0, 0, 0))


def _dims(given: Any, key: str, allowed: str) -> Shape:
    values = cast("list[Any]", [given] if isinstance(given, int) and not isinstance(given, bool) else given)
    if not isinstance(values, list) or not 1 <= len(values) <= 4:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{key} {quoted(given)}: {allowed}")
    out: list[Dim] = []
    for name, value in zip(_PLACES[len(values)], values, strict=True):
        if value == "seq":
            if any(dim.name == "seq" for dim in out):
                raise ValueError(f"{key} {quoted(given)}: `seq` twice; allowed: once")
            out.append(seq_dim())
        elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise ValueError(f"{key} {quoted(given)}: {quoted(value)} is no size; allowed: 1 to {_LARGEST}, or seq")
        else:
            out.append(Dim(name, value))
    return tuple(out)


def _loss(given: Any) -> str:
    word = given.strip().lower() if isinstance(given, str) else ""
    if word not in LOSSES:
        raise ValueError(f"loss {quoted(given)}: allowed: cross-entropy, mse")
    return LOSSES[word]


class _Reader:
    """Reads entries, and counts the layers that they stand for."""

    def __init__(self) -> None:
        self.layers = 0
        self.times = 1

    def chain(self, given: Any, where: str, depth: int) -> Chain:
        """Return a list of layers; `where` is the list's place, to which the number of each entry is added."""
        if depth > _DEEPEST:
            raise ValueError(f"{where}: lists are nested too deep; allowed: {_DEEPEST} levels")
        if isinstance(given, str):
            return self._calls(parse_repr(given, where), where, depth)
        if not isinstance(given, list):
            raise ValueError(f"{'layers' if where == 'layer' else where} {quoted(given)}: expected a list of layers")
        entries = cast("list[Any]", given)
        if not entries and where == "layer":
            raise ValueError("layers []: expected at least one layer")
        return Chain(tuple(self.entry(entry, f"{where} {i}", depth) for i, entry in enumerate(entries, start=1)))

    def _calls(self, calls: Sequence[Called | list[Any]], where: str, depth: int) -> Chain:
        out: list[Entry] = []
        for i, call in enumerate(calls, start=1):
            place = f"{where} {i}"
            if isinstance(call, list):
                if depth >= _DEEPEST:
                    raise ValueError(f"{where}: modules are nested too deep; allowed: {_DEEPEST} levels")
                out.append(self._calls(cast("list[Called | list[Any]]", call), place, depth + 1))
            else:
                out.append(self._called(call, place))
        if not out:
            raise ValueError(f"{where}: no layers; expected lines such as Linear(784, 10)")
        return Chain(tuple(out))

    def entry(self, given: Any, where: str, depth: int) -> Entry:
        if isinstance(given, str):
            text = given.strip()
            if is_call(text):
                return self._called(parse_call(text, where), where)
            return self.build(text, {}, where)
        if not isinstance(given, Mapping) or not given:
            raise ValueError(
                f"{where} {quoted(cast('object', given))}: expected a layer, such as flatten, linear: 10, or Conv2d(3, 64, 3)"
            )
        held = cast("Mapping[str, Any]", given)
        for name, read in (("repeat", self._repeat), ("residual", self._residual), ("concat", self._concat)):
            if name in held:
                return read(held, where, depth)
        if set(held) == {"sequential"}:
            return self.chain(held["sequential"], where, depth + 1)
        if len(held) > 1:
            names = ", ".join(one_line(name) for name in held)
            raise ValueError(
                f"{where}: has several names ({names}); expected one layer with its options, as linear: {{out: 10}}"
            )
        ((name, options),) = held.items()
        if options is None:
            options = {}
        if not isinstance(options, Mapping):
            main = self._kind(name, where).main
            if not main:
                raise ValueError(f"{where} {one_line(name)} {quoted(options)}: takes no option")
            options = {main: options}
        return self.build(name, cast("Mapping[str, Any]", options), where)

    # --- composites

    def _repeat(self, held: Mapping[str, Any], where: str, depth: int) -> Repeated:
        _only(held, ("repeat", "layers"), where)
        times = held["repeat"]
        if isinstance(times, bool) or not isinstance(times, int) or not 1 <= times <= _MOST_LAYERS:
            raise ValueError(f"{where} repeat {quoted(times)}: allowed: 1 to {_MOST_LAYERS}")
        self.times *= times
        body = self.chain(held.get("layers"), f"{where} layer", depth + 1)
        self.times //= times
        return Repeated(times, body)

    def _residual(self, held: Mapping[str, Any], where: str, depth: int) -> Residual:
        _only(held, ("residual", "shortcut"), where)
        short = held.get("shortcut")
        body = self.chain(held["residual"], f"{where} residual", depth + 1)
        return Residual(body, None if short is None else self.chain(short, f"{where} shortcut", depth + 1), where)

    def _concat(self, held: Mapping[str, Any], where: str, depth: int) -> Concat:
        _only(held, ("concat", "dim"), where)
        given, dim = held["concat"], held.get("dim", 1)
        if not isinstance(given, list) or len(cast("list[Any]", given)) < 2:
            raise ValueError(
                f"{where} concat {quoted(cast('object', given))}: expected a list of two or more lists of layers"
            )
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ValueError(f"{where} concat dim {quoted(dim)}: allowed: a whole number from 1")
        branches = [
            self.chain(b, f"{where} branch {i}", depth + 1) for i, b in enumerate(cast("list[Any]", given), start=1)
        ]
        return Concat(tuple(branches), dim, where)

    # --- layers

    def _kind(self, name: str, where: str) -> type[Layer]:
        plain = str(name).strip().lower().replace("_", "").replace("-", "")
        if plain not in kinds():
            known = [*kinds(), "repeat", "residual", "concat", "sequential"]
            close = nearest(plain, known, most=1)
            hint = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(known)}"
            raise ValueError(f"{where} {one_line(name)}: unknown layer; {hint}")
        return kinds()[plain]

    def _called(self, call: Called, where: str) -> One:
        kind = by_torch_name().get(call.name)
        if kind is None:
            close = nearest(call.name, by_torch_name(), most=1)
            hint = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(by_torch_name())}"
            raise ValueError(f"{where} {one_line(call.name)}: unknown module of torch.nn; {hint}")
        if len(call.arguments) > len(kind.positions):
            raise ValueError(
                f"{where} {call.name}: takes {len(kind.positions)} arguments without a name, not {len(call.arguments)}"
            )
        options = dict(zip(kind.positions, call.arguments, strict=False))
        for name, value in call.named.items():
            if kind.aliases.get(name, name) in options:
                raise ValueError(f"{where} {call.name}: {name} is given twice")
            options[kind.aliases.get(name, name)] = value
        return self.build(kind.kind, options, where)

    def build(self, name: str, options: Mapping[str, Any], where: str) -> One:
        """Return a layer of checked options."""
        kind = self._kind(name, where)
        self.layers += self.times
        if self.layers > _MOST_LAYERS:
            raise ValueError(f"{where}: more than {_MOST_LAYERS} layers with all repeats; allowed: fewer")
        return One(_checked(kind, options, where), where)


def _only(held: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in held:
        if key not in keys:
            raise ValueError(f"{where} {keys[0]}: {one_line(key)}: unknown key; allowed: {', '.join(keys)}")


def _checked(kind: type[Layer], options: Mapping[str, Any], where: str) -> Layer:
    """Return a layer, its options checked by pydantic."""
    from pydantic import ValidationError

    place = f"{where} {kind.kind}"
    known = {f.name: f.name for f in fields(kind)} | dict(kind.aliases)
    named: dict[str, Any] = {}
    for option, value in options.items():
        if option in kind.fixed:
            if not any(value == one and type(value) is type(one) for one in kind.fixed[option]):
                allowed = ", ".join(map(str, kind.fixed[option]))
                raise ValueError(f"{place}: {option} {quoted(value)} is not modelled; allowed: {allowed}")
            continue
        field = known.get(option)
        if field is None:
            shown = [name.removesuffix("_") for name in (f.name for f in fields(kind))]
            close = nearest(str(option), [*shown, *kind.aliases], most=1)
            hint = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(shown) or 'none'}"
            raise ValueError(f"{place}: {one_line(option)}: unknown option; {hint}")
        if field in named:
            raise ValueError(f"{place}: {one_line(option)}: names `{field.removesuffix('_')}` a second time")
        named[field] = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
    try:
        checked = _model(kind).model_validate(named)
    except ValidationError as error:
        _refuse_field(place, error)
    try:
        return kind(**{f.name: getattr(checked, f.name) for f in fields(kind)})
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _refuse_field(place: str, error: Any) -> NoReturn:
    raise ValueError(f"{place}: {first_problem(error).replace('in_`', 'in`')}") from None


@cache
def _model(kind: type[Layer]) -> Any:
    """Return the pydantic model of a kind's options."""
    from dataclasses import MISSING

    from pydantic import ConfigDict, create_model

    hints = get_type_hints(kind, localns={"Mapping": Mapping, "Sequence": Sequence}, include_extras=True)
    known: dict[str, Any] = {f.name: (hints[f.name], ... if f.default is MISSING else f.default) for f in fields(kind)}
    return create_model(kind.__name__, __config__=ConfigDict(strict=True, extra="forbid"), **known)

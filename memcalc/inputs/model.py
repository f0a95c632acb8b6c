"""Models: a name, an architecture, and the weights that follow from it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from memcalc.core.dims import numel
from memcalc.errors import InputError, nearest, one_line, quoted
from memcalc.inputs.files import read_bundled, read_json_object, specs_folder
from memcalc.inputs.left_out import left_out, note
from memcalc.inputs.quantization import FIELDS, without_quantization
from memcalc.inputs.towers import text_tower
from memcalc.units import parse_count

if TYPE_CHECKING:
    from memcalc.families.base.module import Weight
    from memcalc.families.base.program import Program
    from memcalc.families.base.support import Support


_ALIKE: Final = 0.65
"""The least similarity of a bundled name that is suggested for an unknown one: "qwen" suggests `qwen3-8b`, "loop" does
not suggest `bloom-3b`."""


class Model:
    """A model to size, made by `load_model`. It never changes, except that it keeps the profiles of its runs."""

    __slots__ = (
        "_copies", "_num_parameters", "_trainable", "_trained", "empty_weight", "fields", "model_type", "name", "notes",
        "profiles", "program", "quantization", "task", "tuning", "weight_classes", "whole",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        model_type: str,
        program: Program,
        fields: Mapping[str, Any] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.notes = notes
        """Notes for the reader on how the model was made, one sentence each."""
        self.fields = fields
        """The config.json that the model was made from; None for a part of another model."""
        self.quantization: Mapping[str, Any] | None = None
        """The `quantization_config` of the configuration, for inference from the checkpoint as it is; None: it has none."""
        self.model_type = model_type
        self.program = program
        self._copies: dict[tuple[str, Any], int] = {}
        self._trainable: Counter[tuple[str, Any]] = Counter()
        self._trained: Counter[tuple[str, Any]] = Counter()
        classes: list[Weight] = []
        for weight in program.weights():
            key = weight.name, weight.shape
            if key not in self._copies:
                self._copies[key] = 0
                classes.append(weight)
            self._copies[key] += 1
            self._trainable[key] += program.wants_gradient(weight)
            self._trained[key] += program.gets_gradient(weight)
        self.weight_classes = tuple(classes)
        """Weights of one name and shape; the first layer's stands for all."""
        self.profiles: dict[Any, Any] = {}
        self.tuning: Any = None
        """The choice of what trains (`memcalc.tuning`) that the model was made for; None: all of it trains."""
        self.task: Any = None
        """The task (`memcalc.tasks`) whose step the program has; None: pretraining."""
        self.whole: Model = self
        """The model that trains as a whole."""
        self._num_parameters = sum(numel(w.shape)[0] * self.copies(w) for w in self.weight_classes)
        self.empty_weight = next((w.name for w in self.weight_classes if not all(dim.size for dim in w.shape)), None)
        """The name of the first weight without elements; None if all have some."""

    @property
    def support(self) -> Support:
        """Return the record of the family's features."""
        from memcalc.families import support_of

        return support_of(self.model_type)

    @property
    def layers(self) -> int:
        return self.program.layers

    @property
    def num_parameters(self) -> int:
        """Return the number of all parameters; tied weights count once."""
        return self._num_parameters

    @property
    def trainable_parameters(self) -> int:
        """Return the number of parameters that require a gradient."""
        return sum(numel(w.shape)[0] * self.trainable(w) for w in self.weight_classes)

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that one token uses: of the routed experts only those that the router
        picks."""
        per_token, experts = self.program.routed
        return sum(
            size * min(per_token, experts) // experts if weight.component == "experts" else size
            for weight in self.weight_classes
            for size in (numel(weight.shape)[0] * self.copies(weight),)
        )

    def check_step(self) -> None:
        """Raise InputError for a model that transformers builds but cannot run."""
        if self.program.source:
            return
        try:
            self.program.check_step()
        except ValueError as error:
            raise InputError(f"--model {self.name}: {one_line(error, 400)}") from None

    def copies(self, weight: Weight) -> int:
        """Return the number of tensors that a weight class stands for."""
        return self._copies[weight.name, weight.shape]

    def trainable(self, weight: Weight) -> int:
        """Return the number of a weight class's tensors that require a gradient."""
        return self._trainable[weight.name, weight.shape]

    def trained(self, weight: Weight) -> int:
        """Return the number of a weight class's tensors that get a gradient."""
        if self.program.source:  # known once the real module has run
            return self.copies(weight) - self.program.idle.get((weight.name, weight.shape), 0)
        return self._trained[weight.name, weight.shape]

    def weights(self) -> list[tuple[str, tuple[int, ...], str | None]]:
        """Return (name as in the checkpoint, shape, dtype or None) of every parameter, in transformers' order."""
        return [
            (w.name.replace("*", str(w.layer), 1), tuple(d.size for d in w.shape), None) for w in self.program.weights()
        ]

    def parameters_by_component(self) -> dict[str, int]:
        """Return parameter counts of "embedding", "attention", "mlp", ... in the order in which they first appear."""
        out: dict[str, int] = {}
        for weight in self.weight_classes:
            out[weight.component] = out.get(weight.component, 0) + numel(weight.shape)[0] * self.copies(weight)
        return out

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {self.model_type}, {self.num_parameters:,} parameters)"


def load_model(source: str | os.PathLike[str] | Mapping[str, Any] | Model) -> Model:
    """Return a model by bundled name or alias, Hub id, path to a config.json or its folder, or the dict of a
    config.json.

    Raises InputError, which names the problem in one line.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, Mapping):
        return from_config(source, one_line(_name_of(source)))
    if not isinstance(source, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"--model {quoted(source)}: expected a name, a Hub id, a path or the dict of a config.json")
    text = os.fspath(source)
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"--model {quoted(text)}: expected a path as text, not as bytes")
    if not text.strip():
        raise InputError(f"--model {quoted(text)}: expected a name, a Hub id, or a path to a config.json or its folder")
    spec = _find_spec(text) if isinstance(source, str) else None
    if spec is not None:
        return from_config(read_bundled(spec)["config"], spec.stem, bundled=True)
    path = Path(text)
    if _exists(path):
        return from_path(path)
    if _looks_like_a_path(text) or not isinstance(source, str):
        raise InputError(
            f"--model {one_line(text)}: no such file or folder; expected a config.json or a folder that holds one"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text, re.ASCII):
        return _from_hub(text)
    close = nearest(text, model_names(), cutoff=_ALIKE)
    hint = f"did you mean {', '.join(close)}?" if close else "see `memcalc models`"
    if not close and parse_count(text) is not None:
        hint = f"for model states alone give it as --params {one_line(text)}; else see `memcalc models`"
    raise InputError(
        f"--model {one_line(text)}: unknown model; {hint} (or a Hub id owner/name, or a path to a config.json)"
    )


def _name_of(config: Mapping[str, Any]) -> Any:
    """Return the name of a model that is given by its fields."""
    own = config.get("name") if config.get("model_type") == "layers" else None
    return config.get("_name_or_path") or own or config.get("model_type") or "config"


def _from_hub(repo_id: str) -> Model:
    """Return the model of a Hub repository. If the Hub is out of reach, use a bundled model whose name says that it has
    the same shape."""
    from memcalc.inputs.hub import OutOfReach, fetch_config

    try:
        return from_config(read_json_object(fetch_config(repo_id), f"--model {repo_id}:"), repo_id)
    except OutOfReach as error:
        from memcalc.inputs.stand_ins import stand_in

        spec = stand_in(repo_id)
        if spec is None:
            raise
        why = f"{repo_id}: {error.why}; {spec.stem} is used instead, a bundled model whose name says that it has the same shape"
        return from_config(read_bundled(spec)["config"], spec.stem, bundled=True, notes=(why,))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long or has a null byte is no file
        return False


def _looks_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~", "\\")) or text.endswith((".json", "/")) or text.count("/") > 1


def from_path(path: Path) -> Model:
    """Return the model of a config.json, or of the folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise InputError(f"--model {one_line(path)}: this folder has no config.json")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    fields = read_json_object(file, "--model")
    try:
        return from_config(fields, name)
    except InputError as error:  # of the file that was given, not of the name that its model gets
        raise InputError(str(error).replace(f"--model {one_line(name)}:", f"--model {one_line(path)}:", 1)) from None


def from_config(config: Mapping[str, Any], name: str, *, bundled: bool = False, notes: tuple[str, ...] = ()) -> Model:
    """Return a model from the fields of a config.json. `notes` are those of the file that the fields are a part of."""
    from memcalc.families import FAMILIES

    quantization = next((config[field] for field in FIELDS if config.get(field) is not None), None)
    try:
        config, of_weights = without_quantization(config)
    except ValueError as error:
        raise InputError(f"--model {one_line(name)}: {one_line(error, 400)}") from None
    notes = (*notes, *(note for note in of_weights if note not in notes))
    model_type = config.get("model_type")
    if model_type is None and isinstance(config.get("layers"), list):
        raise InputError(
            f"--model {one_line(name)}: has a list of `layers`; allowed: --layers FILE, memcalc.load_layers(...)"
        )
    tower = None if isinstance(model_type, str) and model_type in FAMILIES else text_tower(config)
    if tower is not None and str(tower.get("model_type")) in FAMILIES:
        of_tower = from_config(tower, f"{name} (text tower)", bundled=bundled, notes=notes)
        of_tower.quantization = of_tower.quantization or quantization
        return of_tower
    if not isinstance(model_type, str):
        raise InputError(
            f"--model {one_line(name)}: field `model_type` is {_shown(config, 'model_type')}; "
            "it should be the type of a language model, such as llama"
        )
    if model_type not in FAMILIES:
        return _traced(name, model_type, config, f"field `model_type` is {quoted(model_type)}", notes)
    family = FAMILIES[model_type].program
    named: object = config.get("architectures")
    if isinstance(named, list) and any(one in cast("list[object]", named) for one in family.traced_classes):
        return _traced(name, model_type, config, f"field `architectures` is {quoted(cast('object', named))}", notes)
    try:
        checked = family.Config.trusted(config) if bundled else family.Config.read(config)
    except ValueError as error:
        raise InputError(f"--model {one_line(name)}: {one_line(error, 400)}") from None
    program = family(checked)
    notes += program.notes
    sizes = {} if bundled else left_out(config, checked, learns_positions=program.positions_limit is not None)
    notes += (note(model_type, sizes),) if sizes else ()
    model = Model(one_line(name), model_type, program, dict(config), notes)
    model.quantization = quantization
    return model


def _traced(name: str, model_type: str, config: Mapping[str, Any], field: str, notes: tuple[str, ...]) -> Model:
    """Return a model without a program of its own. `field` says which field makes it so."""
    from memcalc.inputs.left_out import note_of_unknown
    from memcalc.tracing.program import Traced

    defaults = note_of_unknown(model_type, config)
    notes += () if defaults is None else (defaults,)
    return Model(one_line(name), model_type, Traced(name, model_type, config, field), dict(config), notes)


def _shown(config: Mapping[str, Any], field: str) -> str:
    return "missing" if field not in config else quoted(config[field])


@cache
def _aliases() -> dict[str, Path]:
    """Return every alias of a bundled model, in lower case, with its spec file."""
    out: dict[str, Path] = {}
    for path in sorted(specs_folder().glob("*.json")):
        for alias in read_bundled(path)["aliases"]:
            out[alias.lower()] = path
    return out


def model_names() -> list[str]:
    """Return the names of the bundled models whose family is modelled."""
    from memcalc.families import FAMILIES

    return sorted(
        path.stem for path in specs_folder().glob("*.json") if read_bundled(path)["config"]["model_type"] in FAMILIES
    )


def _find_spec(text: str) -> Path | None:
    if re.fullmatch(r"[\w.-]{1,100}", text, re.ASCII) and text not in (".", ".."):
        path = specs_folder() / f"{text.lower()}.json"
        if path.is_file():
            return path
    return _aliases().get(text.lower())


def bundled_spec(name: str) -> dict[str, Any] | None:
    """Return the spec file of a bundled model by name or alias; None if there is none."""
    path = _find_spec(name)
    return None if path is None else read_bundled(path)

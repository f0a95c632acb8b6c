"""The program of a model without a family: transformers' own module, traced under fake tensors.

torch and transformers are imported when a model is loaded, to read its weights. Nothing is traced before an estimate
asks for it. `modules.py` decides which class is built. Dropout is traced as a GPU runs it (`realism.gpu_dropout`).
Kernels that transformers would fetch from elsewhere are not used: its own torch code is traced, in the version that
`source` names, as it runs on the CPU.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

from memcalc.errors import InputError, nearest, one_line, quoted
from memcalc.families import FAMILIES
from memcalc.families.base.module import Buffer, Run, Weight
from memcalc.families.base.program import Program
from memcalc.tracing.description import component_of, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INSTALL = "pip install 'memcalc-llm[validate]'"


class Traced(Program):
    """A model of transformers that replaces a program."""

    polynomial = False
    pads = False
    autocasts = False

    def __init__(self, name: str, model_type: str, fields: Mapping[str, Any], field: str = "") -> None:
        """Raise InputError if torch is missing, or if transformers does not know the type or refuses the fields.

        `field` is the field that there is no program for; by default the type.
        """
        self.name = one_line(name)
        field = field or f"field `model_type` is {quoted(model_type)}"
        programs = f"({len(FAMILIES)} types have one)"
        try:
            from memcalc.tracing import modules
        except ImportError as error:
            self.refuse(f"{field}: memcalc has no program for it {programs}; to trace transformers' own code: "
                        f"{INSTALL} ({one_line(error)})")  # fmt: skip
        known = modules.known_types()
        if model_type not in known:
            close = nearest(model_type, {*FAMILIES, *known})
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            self.refuse(f"{field}: neither memcalc nor {modules.TRANSFORMERS} knows it{hint}")
        try:
            super().__init__(modules.configuration(model_type, fields))
            if modules.auto_class(self.config) is None:
                self.refuse(f"{field}: {modules.TRANSFORMERS} has no language model of it {programs}")
            self.described = modules.describe(self.config)
        except InputError:
            raise
        except Exception as error:
            self.refuse(f"{modules.TRANSFORMERS} cannot build this {one_line(model_type)}: {_said(error)}")
        self.real = f"{modules.TRANSFORMERS}'s {self.described.class_name}"
        self.source = f"{self.real} traced under {modules.TORCH}"
        self.attention_kinds = self.described.attention_kinds
        self.layers = self.described.layers
        self.max_seq_len = self.described.max_seq_len
        self.positions_limit = self.described.positions_limit
        self.routed = self._routed()

    def refuse(self, why: str) -> NoReturn:
        raise InputError(f"--model {self.name}: {why}")

    def weights(self) -> Iterator[Weight]:
        for (name, layer), sizes, _ in self.described.parameters:
            yield Weight(name, shape_of(sizes), component_of(name), layer)

    def buffers(self) -> Iterator[Buffer]:
        for (name, _), sizes, dtype in self.described.buffers:
            yield Buffer(name, shape_of(sizes), dtype)

    def pattern(self) -> tuple[int, int] | None:
        """Return None: a trace covers all layers."""
        return None

    def traced_step(self, run: Run) -> int:
        from memcalc.tracing.step import step

        try:
            forward_end = step(run, self.config, self.held)
        except InputError:
            raise
        except Exception as error:
            self.refuse(f"{self.real} cannot be traced: {_said(error)}")
        reached = Counter((row.name, row.shape) for row in run.memory.rows if row.component == "gradients")
        self.idle = Counter((w.name, w.shape) for w in self.weights()) - reached
        return forward_end

    def _routed(self) -> tuple[int, int]:
        counts = [sizes[0] for (name, _), sizes, _ in self.described.parameters if component_of(name) == "experts"]
        per_token = self.described.experts_per_token
        return (per_token, counts[0]) if counts and per_token else (1, 1)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error, 200)}"

"""docs/families.md: every model type that has a program, and what it goes with; from the records of the families."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from memcalc.families import FAMILIES
from memcalc.families.base.support import Support
from memcalc.inputs.model import from_config
from memcalc.layout.expert_parallel import expert_path, runs_dispatched

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from cases import parameter_cases

COLUMNS: dict[str, Callable[[Support], bool]] = {
    "tp": lambda s: bool(s.tensor_parallel),
    "sp": lambda s: s.sequence_parallel,
    "pp": lambda s: s.stages,
    "cp": lambda s: s.context_parallel,
    "DeepSpeed tp, pp": lambda s: s.megatron_deepspeed,
    "DeepSpeed cp": lambda s: s.ulysses,
    "DeepSpeed ep": lambda s: s.auto_ep is not None,
    "Megatron": lambda s: s.architecture is not None,
    "Liger": lambda s: s.liger is not None,
}

HEAD = """# Model types

Written by `docs/generate.py` from the families' own records. Every type here has a program, and runs on the data-parallel axis
with the engines none, ddp, fsdp2 and deepspeed; the engines' pages say which types they refuse. A dot says that it also
runs with

- **tp**, **sp**, **pp**, **cp**, **ep**: `--engine fsdp2` and `--tp`, `--tp --sequence-parallel`, `--pp`, `--cp`, `--ep`;
- **DeepSpeed**: `--engine deepspeed` and these axes;
- **Megatron**: `--engine megatron`, all axes (`--ep` if it has experts);
- **Liger**: `--kernels fused`.

A configuration can ask for what an axis does not take, such as sliding windows with `--cp`, or tied embeddings with `--pp`.
That is refused by name.
"""


def dispatched(model_type: str) -> bool:
    """Whether transformers sends the tokens of this type to experts on other ranks (`ep_plan`)."""
    program = from_config(parameter_cases(model_type)[0], "").program
    return expert_path(program) is not None and runs_dispatched(program)


def page() -> str:
    """The text of docs/families.md."""
    names = [*[*COLUMNS][:4], "ep", *[*COLUMNS][4:]]
    lines = [*HEAD.splitlines(), "", f"| model type | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    counts = dict.fromkeys(names, 0)
    for name in FAMILIES:
        support = FAMILIES[name].support
        has = {column: test(support) for column, test in COLUMNS.items()} | {"ep": dispatched(name)}
        for column in names:
            counts[column] += has[column]
        lines.append(f"| `{name}` | {' | '.join('●' if has[column] else '' for column in names)} |")
    lines.append(f"| **{len(FAMILIES)} types** | {' | '.join(str(counts[column]) for column in names)} |")
    return "\n".join(lines) + "\n"

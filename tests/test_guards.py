"""Guards of the architecture: what an estimate imports, which way imports point, how docstrings begin.

Each guard is shown to fail.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from command import PACKAGE, environment

LAYERS: tuple[tuple[str, ...], ...] = (
    ("memcalc.errors", "memcalc.registry", "memcalc.units", "memcalc.core.dims", "memcalc.core.dtypes"),
    ("memcalc.core.tensor", "memcalc.core.noted", "memcalc.core.ops.strides"),
    ("memcalc.core.selective", "memcalc.core.amounts", "memcalc.core.rows"),
    ("memcalc.core.autograd",),
    ("memcalc.core",),
    (
        "memcalc.inputs.bounded",
        "memcalc.inputs.files",
        "memcalc.inputs.towers",
        "memcalc.inputs.cublas",
        "memcalc.inputs.options",
        "memcalc.inputs.file_options",
        "memcalc.inputs.hub",
        "memcalc.inputs.gpu",
        "memcalc.inputs.local_gpu",
    ),
    ("memcalc.optimizers", "memcalc.families", "memcalc.tracing", "memcalc.hardware"),
    ("memcalc.layout",),
    ("memcalc.kernels",),
    ("memcalc.tape", "memcalc.megatron"),
    ("memcalc.pipelining",),
    ("memcalc.inputs",),
    ("memcalc.quantized",),
    ("memcalc.tuning",),
    ("memcalc.tasks",),
    ("memcalc.formats",),
    ("memcalc.setup",),
    ("memcalc.offload",),
    ("memcalc.engines.base",),
    ("memcalc.engines.none",),
    (
        "memcalc.engines.ddp",
        "memcalc.engines.fsdp2",
        "memcalc.engines.deepspeed",
        "memcalc.engines.megatron",
        "memcalc.engines.colossalai",
    ),
    ("memcalc.engines",),
    ("memcalc.device",),
    ("memcalc.estimation.compute",),
    ("memcalc.timing",),
    (
        "memcalc.inference.caches",
        "memcalc.inference.heights",
        "memcalc.inference.steps",
        "memcalc.inference.moments",
        "memcalc.inference.rewarding",
        "memcalc.inference.rollout",
        "memcalc.inference.proximal_rollout",
    ),
    ("memcalc.estimation",),
    ("memcalc.inference",),
    ("memcalc.validate",),
    ("memcalc",),
    ("memcalc.report",),
    ("memcalc.decisions",),
    ("memcalc.planning",),
    ("memcalc.explanation",),
    ("memcalc.pictures",),
    ("memcalc.quiz",),
    ("memcalc.cli", "memcalc.__main__"),
)
"""Every module by the longest prefix of its name, low to high. A module imports from its own layer and from below."""

UPWARD = {
    ("memcalc.core.tensor", "memcalc.core.ops.elementwise"),  # a + b of two tensors is an op
    ("memcalc.estimation.report", "memcalc.report.document"),  # Report.to_dict
}
"""The imports that point up, inside functions."""

ONLY: dict[str, tuple[str, ...]] = {
    "typer": ("memcalc.cli",),
    "click": (),
    "rich": (
        "memcalc.cli",
        "memcalc.decisions",
        "memcalc.report",
        "memcalc.explanation",
        "memcalc.pictures",
        "memcalc.quantized",
        "memcalc.quiz",
    ),
    "huggingface_hub": ("memcalc.inputs.hub",),
    "torch": ("memcalc.tracing", "memcalc.validate"),
    "transformers": ("memcalc.tracing", "memcalc.validate"),
    "numpy": ("memcalc.estimation.many",),
}
"""Who may import what, anywhere in its source."""

IN_PLAIN_WORDS = (
    "memcalc.cli",
    "memcalc.core",
    "memcalc.decisions",
    "memcalc.device",
    "memcalc.engines",
    "memcalc.errors",
    "memcalc.estimation",
    "memcalc.explanation",
    "memcalc.families",
    "memcalc.formats",
    "memcalc.hardware",
    "memcalc.inference",
    "memcalc.inputs",
    "memcalc.kernels",
    "memcalc.layout",
    "memcalc.megatron",
    "memcalc.optimizers",
    "memcalc.pictures",
    "memcalc.pipelining",
    "memcalc.quiz",
    "memcalc.planning",
    "memcalc.registry",
    "memcalc.report",
    "memcalc.setup",
    "memcalc.tape",
    "memcalc.tasks",
    "memcalc.timing",
    "memcalc.tracing",
    "memcalc.tuning",
    "memcalc.units",
    "memcalc.validate",
)
"""The rooms and modules whose docstrings begin with a verb or a noun phrase."""

NO_BEGINNINGS = ("What", "Of", "The same", "Its", "Whose", "Which", "That")
"""Words that leave a docstring without a subject and a verb of its own."""

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub")


def layer_of(module: str) -> int:
    """The layer of a module; LookupError if it has none."""
    best, found = -1, -1
    for i, prefixes in enumerate(LAYERS):
        for prefix in prefixes:
            under = module == prefix or (prefix != "memcalc" and module.startswith(prefix + "."))
            if under and len(prefix) > best:
                best, found = len(prefix), i
    if found < 0:
        raise LookupError(f"{module} is in no layer: add it to LAYERS")
    return found


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST, modules: frozenset[str]) -> Iterator[str]:
    """Full names of what a source imports when it runs, functions included, TYPE_CHECKING blocks left out."""
    for child in ast.iter_child_nodes(node):
        if for_types_only(child):
            assert isinstance(child, ast.If)
            for statement in child.orelse:
                yield from imports(ast.Module([statement], []), modules)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            assert child.module is not None
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield full if full in modules else child.module
        else:
            yield from imports(child, modules)


@cache
def imported(source: str, modules: frozenset[str]) -> tuple[str, ...]:
    return tuple(imports(ast.parse(source), modules))


@cache
def sources() -> dict[str, str]:
    """Every module of the package with its source."""
    out: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("memcalc", *path.relative_to(PACKAGE).with_suffix("").parts)
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return out


def upward(given: dict[str, str]) -> list[str]:
    """Imports that point from a lower layer to a higher one."""
    modules = frozenset(given) | frozenset(sources())
    return [
        f"{module} imports {target}"
        for module, source in given.items()
        for target in imported(source, modules)
        if target.split(".")[0] == "memcalc" and layer_of(target) > layer_of(module) and (module, target) not in UPWARD
    ]


def not_allowed(given: dict[str, str]) -> list[str]:
    """Imports of a library by a module that may not."""
    return [
        f"{module} imports {target}"
        for module, source in given.items()
        for target in imported(source, frozenset())
        if target.split(".")[0] in ONLY
        and not any(module == who or module.startswith(who + ".") for who in ONLY[target.split(".")[0]])
    ]


def badly_begun(given: dict[str, str]) -> list[str]:
    """Return the docstrings, those of attributes included, that begin with one of NO_BEGINNINGS, with their modules."""
    return [
        f"{module}:{statement.lineno} {statement.value.value}"
        for module, source in given.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        and any(re.match(rf"{words}\b", statement.value.value.strip()) for words in NO_BEGINNINGS)
    ]


def loaded_after(statement: str) -> set[str]:
    """Which of the heavy libraries a fresh interpreter has imported after a statement."""
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


# --- the guards


@pytest.mark.parametrize(
    "statement",
    [
        "from memcalc.cli.main import main; main(['estimate', '--model', 'llama-7b', '--gpus', '8', '--zero', '3'])",
        "from memcalc.cli.main import main; main(['estimate', '--model', 'llama-7b', '--json', '--gpu', 'h100-80gb'])",
        "import memcalc; memcalc.estimate('gemma-2-2b', optimizer='muon', recompute='full').to_dict()",
        "from memcalc.cli.main import main; main(['models']); main(['gpus'])",
    ],
)
def test_an_estimate_imports_nothing_heavy(statement: str) -> None:
    assert loaded_after(statement) == set()


def test_import_memcalc_prints_nothing_and_needs_no_command_line() -> None:
    code = "import sys, memcalc; assert not {'typer', 'rich', 'click'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_every_module_has_a_layer() -> None:
    for module in sources():
        layer_of(module)


def test_imports_point_down() -> None:
    assert upward(sources()) == []


def test_the_exceptions_are_needed() -> None:
    modules = frozenset(sources())
    found = {(m, t) for m, source in sources().items() for t in imported(source, modules)}
    assert found >= UPWARD


def test_libraries_stay_where_they_belong() -> None:
    assert not_allowed(sources()) == []


@pytest.mark.parametrize("room", IN_PLAIN_WORDS)
def test_docstrings_have_a_subject_or_a_verb(room: str) -> None:
    inside = {m: source for m, source in sources().items() if m == room or m.startswith(room + ".")}
    assert inside, "no such room"
    assert badly_begun(inside) == []


# --- that they can fail


def names(found: Iterable[str]) -> list[str]:
    return [line.split(" imports ")[1] for line in found]


def test_the_import_guard_can_fail() -> None:
    assert loaded_after("import json, huggingface_hub") == {"huggingface_hub"}


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("memcalc.core.dims", "from memcalc.core.tensor import Tensor", "memcalc.core.tensor"),
        ("memcalc.core.ops.matmul", "import memcalc.families.llama", "memcalc.families.llama"),
        ("memcalc.core.ops.matmul", "def f():\n    from memcalc.engines import ddp", "memcalc.engines.ddp"),
        ("memcalc.families.llama", "from memcalc.estimation import estimate", "memcalc.estimation.estimate"),
        ("memcalc.engines.ddp", "if x:\n    from memcalc.cli.main import main", "memcalc.cli.main"),
        ("memcalc.report.table", "try:\n    import memcalc.cli\nexcept ImportError:\n    pass", "memcalc.cli"),
        ("memcalc.core.rows", "if TYPE_CHECKING:\n    pass\nelse:\n    import memcalc.cli", "memcalc.cli"),
        (
            "memcalc.core.tensor",
            "class A:\n    def f(self):\n        from memcalc.core.ops.shape import view",
            "memcalc.core.ops.shape",
        ),
    ],
)
def test_the_direction_guard_can_fail(module: str, source: str, target: str) -> None:
    assert names(upward({module: source})) == [target]


def test_the_direction_guard_lets_types_through() -> None:
    assert (
        upward({"memcalc.core.dims": "from __future__ import annotations\nif TYPE_CHECKING:\n    import memcalc.cli"})
        == []
    )
    assert upward({"memcalc.cli.main": "from memcalc.core.dims import Dim\nimport memcalc"}) == []


def test_a_module_without_a_layer_is_noticed() -> None:
    with pytest.raises(LookupError, match=r"memcalc\.surprise"):
        upward({"memcalc.surprise": "import memcalc.core.dims"})


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("memcalc.report.table", "import typer", "typer"),
        ("memcalc.estimation.estimate", "def f():\n    from rich.table import Table", "rich.table"),
        ("memcalc.cli.main", "import torch.nn", "torch.nn"),
        ("memcalc.inputs.model", "import transformers", "transformers"),
        ("memcalc.inputs.model", "from huggingface_hub import hf_hub_download", "huggingface_hub"),
        ("memcalc.clientele", "import typer", "typer"),
        ("memcalc.estimation.estimate", "import numpy as np", "numpy"),
        ("memcalc.core.unknowns", "def f():\n    import numpy", "numpy"),
    ],
)
def test_the_library_guard_can_fail(module: str, source: str, target: str) -> None:
    assert names(not_allowed({module: source})) == [target]


def test_the_library_guard_lets_the_right_ones_through() -> None:
    assert not_allowed({"memcalc.cli.main": "import typer, rich", "memcalc.report.table": "import rich.table"}) == []


@pytest.mark.parametrize("words", NO_BEGINNINGS)
@pytest.mark.parametrize(
    "source",
    ["{} it is.", "def f():\n    {} it is.", "class A:\n    x: int\n    {} it is.", "async def f():\n    {} it is."],
)
def test_the_docstring_guard_can_fail(source: str, words: str) -> None:
    assert len(badly_begun({"memcalc.core.dims": source.replace("{} it is.", f'"""{words} it is."""')})) == 1
    assert badly_begun({"memcalc.core.dims": source.replace("{} it is.", '"""Return whose offset it is."""')}) == []


def test_the_package_is_where_it_is_read() -> None:
    assert "memcalc.estimation.estimate" in sources()
    assert Path(PACKAGE, "__init__.py").is_file()

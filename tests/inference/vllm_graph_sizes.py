"""vLLM's own rule for the sizes of its CUDA graphs (config/vllm.py, `_set_cudagraph_sizes`), and its extrapolation of their
memory (v1/worker/gpu/cudagraph_utils.py), run without a GPU.

    python tests/inference/vllm_graph_sizes.py FOLDER > tests/inference/vllm_graph_sizes.json

FOLDER has the package `vllm` of a wheel, unpacked. The functions are vLLM's own, cut out of their files; stand-ins take the
places of what they read.
"""

from __future__ import annotations

import ast
import enum
import json
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CASES = [
    (blackwell, tokens, sequences)
    for blackwell in (False, True)
    for tokens, sequences in (
        (8192, 1024),
        (2048, 256),
        (16384, 1024),
        (300, 256),
        (64, 9),
        (8192, 100),
        (5, 3),
        (2048, 512),
    )
]
SAMPLES = [([], 3), ([2**20], 1), ([5 * 2**20, 0], 51), ([5 * 2**20, 3 * 2**20], 51)]
"""What was measured of the largest graphs, and the number of graphs."""


class CUDAGraphMode(enum.Enum):
    NONE = 0
    FULL_AND_PIECEWISE = 1


def _function(file: Path, name: str, **seen: Any) -> Any:
    """A function of a file, with the names of modules that it reads."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            space: dict[str, Any] = seen
            exec(compile(ast.Module([node], []), str(file), "exec"), space)
            return space[name]
    raise LookupError(name)


def sizes(folder: Path) -> Iterator[dict[str, Any]]:
    platform = SimpleNamespace(blackwell=False)
    platform.is_device_capability_family = lambda _: platform.blackwell
    for name, content in (("vllm", {}), ("vllm.platforms", {"current_platform": platform})):
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(content)
    rule = _function(
        folder / "vllm/config/vllm.py", "_set_cudagraph_sizes", CUDAGraphMode=CUDAGraphMode, logger=logging.getLogger()
    )
    for blackwell, tokens, sequences in CASES:
        platform.blackwell = blackwell
        compilation = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, max_cudagraph_capture_size=None, cudagraph_capture_sizes=None,
            compile_sizes=None, post_init_cudagraph_sizes=lambda: None,
        )  # fmt: skip
        config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False), compilation_config=compilation, uniform_decode_query_len=1,
            scheduler_config=SimpleNamespace(max_num_seqs=sequences, max_num_batched_tokens=tokens), speculative_config=None,
            performance_mode="balanced", parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )  # fmt: skip
        rule(config)
        yield {
            "blackwell": blackwell, "tokens": tokens, "sequences": sequences,
            "sizes": list(compilation.cudagraph_capture_sizes),
        }  # fmt: skip


def extrapolated(folder: Path) -> list[Any]:
    file = folder / "vllm/v1/worker/gpu/cudagraph_utils.py"
    least = next(
        ast.literal_eval(str(eval(ast.unparse(node.value))))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_MIN_PER_GRAPH_BYTES"
    )
    own = _function(file, "_extrapolate_full_graph_memory", _MIN_PER_GRAPH_BYTES=least)
    return [{"samples": samples, "graphs": graphs, "bytes": own(samples, graphs)} for samples, graphs in SAMPLES]


if __name__ == "__main__":
    of = Path(sys.argv[1])
    print(json.dumps({"sizes": list(sizes(of)), "extrapolated": extrapolated(of)}, separators=(",", ":")))

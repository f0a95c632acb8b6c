"""Writes tests/measured_ops/NAME.json on a machine with a GPU: what single ops allocate and free, by the allocator's history.

    python tests/measure_ops.py tests/measured_ops/NAME.json

An event is the bytes of an allocation, or less than zero the bytes of a free within the op. What stays is the op's results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HEADS = [  # batch, heads, kv_heads, seq, head_dim, value_dim
    (1, 32, 32, 2048, 128, 128), (2, 32, 8, 2048, 64, 64), (1, 16, 16, 1000, 64, 64), (1, 16, 16, 1024, 96, 96),
    (1, 16, 4, 2049, 80, 80), (2, 8, 8, 512, 256, 256), (1, 16, 16, 2048, 192, 128), (3, 12, 12, 100, 64, 64),
    (1, 32, 8, 4096, 128, 128), (1, 32, 1, 1024, 128, 128), (2, 16, 2, 640, 128, 128), (1, 14, 2, 777, 64, 64),
    (4, 4, 4, 33, 32, 32), (1, 16, 16, 300, 128, 128), (1, 40, 8, 4100, 128, 128), (1, 8, 4, 1024, 256, 256),
    (1, 24, 24, 1024, 72, 72), (1, 71, 1, 1024, 64, 64), (1, 16, 16, 2048, 160, 160), (1, 64, 8, 8192, 128, 128),
]  # fmt: skip
MATRICES = [  # rows, columns
    (2048, 4096), (4096, 2048), (4096, 2304), (16384, 4096), (8192, 8192), (1024, 768), (8192, 768), (512, 4096),
    (1023, 4096), (1024, 4096), (2048, 4095), (2048, 4098), (65536, 1024), (100000, 64), (4096, 32000), (2048, 128),
    (131072, 128), (16384, 11008), (32000, 4096), (4096, 11008), (3000, 5120), (262144, 256), (300000, 8192), (1025, 33),
]  # fmt: skip
TABLES = [  # tokens, vocab, hidden
    (2048, 32000, 4096), (8192, 50257, 768), (1000, 32000, 1024), (3072, 32000, 1024), (3073, 32000, 1024),
    (16384, 128256, 2048), (4096, 151936, 896),
]  # fmt: skip
MOST_ELEMENTS = 5 * 10**8  # of a matrix that ops with a backward are measured with


def events_of(run: Callable[[], Any]) -> list[int]:
    """Return the events of a call, after two that have made workspaces."""
    memory = torch.cuda.memory
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    memory._record_memory_history("all", context=None, stacks="python", clear_history=True)
    kept = run()
    trace = memory._snapshot()["device_traces"][torch.cuda.current_device()]
    memory._record_memory_history(None)
    del kept
    live: dict[int, int] = {}
    out: list[int] = []
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
            out.append(entry["size"])
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            out.append(-live.pop(entry["addr"]))
    return out


def backward_of(out: torch.Tensor, *inputs: torch.Tensor) -> list[int]:
    gradient = torch.randn_like(out)
    return events_of(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))


def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


def attention() -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for kernel, (b, h, kv, s, d, dv), dt in product(KERNELS, HEADS, DTYPES):
        kv_heads = h if kernel == "efficient" else kv
        q, k, v = (
            made(b, s, heads, width, dtype=DTYPES[dt]).transpose(1, 2)
            for heads, width in ((h, d), (kv_heads, d), (kv_heads, dv))
        )
        try:
            with sdpa_kernel(KERNELS[kernel]):
                result = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != h)
        except RuntimeError:  # the kernel does not take this
            continue
        case = {"kernel": kernel, "b": b, "h": h, "kv": kv, "s": s, "d": d, "dv": dv, "dt": dt, "mask": False}
        out.append({"op": "sdpa backward", "events": backward_of(result, q, k, v), **case})
    return out


def matrices() -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for (rows, columns), (dt, dtype) in product(MATRICES, DTYPES.items()):
        found: dict[str, list[int]] = {}
        x = made(rows, columns, dtype=dtype)
        plain = x.detach()
        found["sum over rows"] = events_of(lambda a=plain: a.sum(0))
        found["norm over rows"] = events_of(lambda a=plain: torch.norm(a, dim=-2, keepdim=True))
        if rows * columns <= MOST_ELEMENTS:
            weight, bias = (made(columns, dtype=dtype) for _ in range(2))
            found["layer_norm"] = events_of(lambda a=(x, (columns,), weight, bias): F.layer_norm(*a))
            found["softmax backward"] = backward_of(F.softmax(x, -1), x)
            found["log_softmax backward"] = backward_of(F.log_softmax(x, -1), x)
        out += [{"op": op, "events": events, "rows": rows, "cols": columns, "dt": dt} for op, events in found.items()]
    return out


def tables() -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for (tokens, vocab, hidden), (dt, dtype) in product(TABLES, DTYPES.items()):
        table, rows = made(vocab, hidden, dtype=dtype), made(tokens, hidden, dtype=dtype)
        ids = torch.randint(vocab, (1, tokens), device="cuda")
        places = torch.randint(tokens, (2 * tokens,), device="cuda")
        for op, events in (
            ("embedding backward", backward_of(F.embedding(ids, table), table)),
            ("index backward", backward_of(rows[places], rows)),
        ):
            out.append({"op": op, "events": events, "tokens": tokens, "vocab": vocab, "h": hidden, "dt": dt})
    return out


def main() -> None:
    gpu = torch.cuda.get_device_properties(0)
    environment = {
        "torch": torch.__version__, "gpu": gpu.name, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "multiprocessors": gpu.multi_processor_count, "threads": gpu.max_threads_per_multi_processor,
    }  # fmt: skip
    ops = ",\n".join("  " + json.dumps(one) for one in [*attention(), *matrices(), *tables()])
    text = f'{{\n "environment": {json.dumps(environment)},\n "ops": [\n{ops}\n ]\n}}\n'
    Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

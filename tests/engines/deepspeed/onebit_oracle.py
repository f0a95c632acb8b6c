"""What DeepSpeed 0.19.6 allocates and sends with 1-bit Adam, 1-bit LAMB, 0/1 Adam and FusedLamb: its own engine and optimizers
around transformers' model on CPU tensors, a rank of a `fake` process group of any size.

0.19.6 is the last release that has the 1-bit optimizers. They are not in the one that everything else is held against, so what
they do is on record in `onebit.json`, which this program writes in an environment where `deepspeed` is 0.19.6:

    PYTHONPATH=FOLDER_OF_DEEPSPEED_0_19_6:tests:. python tests/engines/deepspeed/onebit_oracle.py

cupy, which packs the signs, is replaced by functions over torch's tensors of the same shapes; FusedLamb's CUDA kernel by the
tensors that its C++ makes (csrc/lamb/fused_lamb_cuda.cpp).
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

RECORD = Path(__file__).with_name("onebit.json")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "vocab_size": 701,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 60, "n_layer": 2, "n_head": 4, "n_positions": 63, "vocab_size": 501,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
MODELS = {"llama": LLAMA, "gpt2": GPT2}
TYPES = {"onebit-adam": "OneBitAdam", "onebit-lamb": "OneBitLamb", "zero-one-adam": "ZeroOneAdam", "lamb": "Lamb"}

ONE_BIT = ("onebit-adam", "onebit-lamb", "zero-one-adam")
PHASES = ("warmup", "compressed")


def _case(
    model: str, gpus: int, optimizer: str, precision: str, phase: str = "", micro_batches: int = 1
) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "precision": precision, "gpus": gpus, "phase": phase,
            "micro_batches": micro_batches}  # fmt: skip


CASES = [
    *(_case("gpt2", 6, name, precision, "compressed") for name in ONE_BIT for precision in ("fp16", "fp32")),
    *(_case("gpt2", 8, name, "fp16", "compressed", 2) for name in ONE_BIT),
    *(_case("gpt2", 2, name, "fp16", "warmup") for name in ONE_BIT),
    *(_case("gpt2", 4, "lamb", precision) for precision in ("fp16", "fp32")),
    *(_case("llama", 4, name, "bf16", phase) for name in ONE_BIT for phase in PHASES),
    *(_case("llama", 4, name, "fp32", "warmup") for name in ONE_BIT),
    *(_case("llama", 1, name, "fp16", "compressed") for name in ONE_BIT),
    _case("llama", 8, "lamb", "fp16", "", 2),
    _case("llama", 2, "onebit-lamb", "fp32", "compressed", 2),
    _case("llama", 16, "onebit-adam", "bf16", "compressed"),
]


def _cupy() -> ModuleType:
    """A module with what DeepSpeed calls of cupy, over torch's tensors."""

    def packbits(bits: torch.Tensor) -> torch.Tensor:
        return torch.zeros(-(-bits.numel() // 8), dtype=torch.uint8)

    def unpackbits(packed: torch.Tensor) -> torch.Tensor:
        return torch.zeros(8 * packed.numel(), dtype=torch.uint8)

    def split(packed: torch.Tensor, chunks: int) -> list[torch.Tensor]:
        return list(packed.reshape(chunks, -1).unbind(0))

    def zeros(shape: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(
            [n.__self__.numel() if callable(n) else n for n in shape], dtype=dtype
        )  # `.size` of an array

    module: Any = ModuleType("cupy")
    module.packbits, module.unpackbits, module.split, module.zeros = packbits, unpackbits, split, zeros
    stream = SimpleNamespace(synchronize=lambda: None)
    device = SimpleNamespace(use=lambda: None)
    module.cuda = SimpleNamespace(Device=lambda _: device, get_current_stream=lambda: stream)
    module.from_dlpack = None
    return module


class _FusedLamb:
    """The tensors of `lamb` in C++."""

    def load(self) -> _FusedLamb:
        return self

    def lamb(self, p: torch.Tensor, *_: Any) -> torch.Tensor:
        dtype = torch.float32 if p.dtype is torch.float16 else p.dtype
        _w, _u = torch.empty(512, dtype=dtype), torch.empty(512, dtype=dtype)
        return torch.empty(1, dtype=dtype)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    sys.modules["cupy"] = _cupy()
    from deepspeed.ops.lamb import fused_lamb

    own = fused_lamb.FusedLambBuilder
    fused_lamb.FusedLambBuilder = _FusedLamb
    with contextlib.suppress(ModuleNotFoundError):
        from deepspeed.runtime.compression.cupy import CupyBackend

        CupyBackend.torch2cupy = CupyBackend.cupy2torch = lambda self, tensor: tensor
    try:
        yield
    finally:
        fused_lamb.FusedLambBuilder = own
        del sys.modules["cupy"]


def measured(case: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """Bytes of a steady step, what it sent (collective, dtype, elements, calls), and the optimizer's states."""
    import deepspeed
    from deepspeed_oracle import RankMode, ranks
    from oracle import build

    mode = RankMode()
    params: dict[str, Any] = {"lr": 1e-4}
    if case["phase"]:
        name = "var_freeze_step" if case["optimizer"] == "zero-one-adam" else "freeze_step"
        params[name] = 2 if case["phase"] == "compressed" else 1000
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["micro_batches"],
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": TYPES[case["optimizer"]], "params": params},
    }
    if case["precision"] != "fp32":
        config[case["precision"]] = {"enabled": True}
    if case["precision"] == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    with ranks(case["gpus"]), stand_ins():
        model = build(MODELS[case["model"]], "sdpa", torch.float32)
        buffers = list(model.buffers())
        ids = torch.arange(16).unsqueeze(0)
        with mode:
            for tensor in [ids, *model.parameters(), *buffers]:
                mode.register(tensor)
            del buffers, tensor
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            out: dict[str, Any] = {}
            for _ in range(steps):
                gc.collect()
                mode.sent = Counter()
                resident = mode.now
                forward = backward = step = 0
                for _ in range(case["micro_batches"]):
                    mode.begin("forward")
                    engine.held_loss = engine(input_ids=ids, labels=ids).loss
                    gc.collect()
                    forward = max(forward, mode.highest)
                    mode.begin("backward")
                    engine.backward(engine.held_loss)
                    backward = max(backward, mode.highest)
                    mode.begin("step")
                    engine.step()
                    step = mode.highest
                sent = sorted([*key, calls] for key, calls in mode.sent.items())
                out = {"resident": resident, "forward": forward, "backward": backward, "step": step, "sent": sent}
            out["states"] = _states(engine.basic_optimizer)
            out["skipped"] = engine.skipped_steps
        engine.destroy()
    return out


def _states(optimizer: Any) -> dict[str, int]:
    """Bytes of each state, those of equal names together; those of lists on the optimizer by the lists' names."""
    seen: set[int] = set()
    out: Counter[str] = Counter()

    def add(name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in seen:
            seen.add(key)
            out[name] += tensor.untyped_storage().nbytes()

    for state in optimizer.state.values():
        for name, tensor in state.items():
            add(name, tensor)
    for name in ("exp_avg_flat", "worker_errors", "server_errors", "lamb_coeffs"):
        for tensor in getattr(optimizer, name, ()):
            add(name, tensor)
    for tensor in getattr(optimizer, "dummy_exp_avg", {}).values():
        add("dummy_exp_avg", tensor)
    return dict(out)


def main() -> None:
    records = []
    for case in CASES:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                records.append({"case": case, "measured": measured(case)})
            except Exception as error:  # DeepSpeed refuses some
                records.append({"case": case, "error": f"{type(error).__name__}: {error}"[:200]})
        print(case, records[-1].get("error", "ok"), flush=True)
        lines = ",\n ".join(json.dumps(one) for one in records)
        RECORD.write_text(f"[\n {lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()

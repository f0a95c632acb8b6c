"""docs/number.md: the way of one tensor, the output of llama-7b's gate_proj, from the configuration to the totals.

Every number and every line of code on the page is taken from a run, from the report of the README's setup, or from the source.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from pathlib import Path

import memcalc
from memcalc.families.base.blocks import gated
from memcalc.families.llama import Llama

MODEL, SETUP = "llama-7b", {"gpus": 8, "zero": 3}
TENSOR = "model.layers.*.mlp.gate_proj"
CONFIG = Path(__file__).resolve().parent.parent / "model_specs" / f"{MODEL}.json"

PAGE = """# How a number is made

Written by `docs/generate.py`; every number below is taken from the code and from one report.

This page follows one tensor, the output of `gate_proj` in the feed-forward block of {model}, from the model's configuration
to the last line of the table. The setup is the README's:

```sh
memcalc estimate --model {model} --zero 3 --gpus 8 --rows
```

## 1. The configuration gives the dims

`model_specs/{model}.json` has the fields of the model's `config.json`. Three of them matter here:

| field | value | dim |
|---|---|---|
| `intermediate_size` | {ffn} | `ffn` |
| `hidden_size` | {hidden} | `hidden` |
| `num_hidden_layers` | {layers} | `layers` |

The setup gives two more: `batch` is {batch} (`--micro-batch-size`) and `seq` is {seq} (`--seq-len`, by default the smaller of
2048 and the model's maximum).

## 2. The program makes the tensor

The family's file, `memcalc/families/llama.py`, reads like transformers' `LlamaMLP.forward`:

```python
{mlp}```

`gated` is in `memcalc/families/base/blocks.py`:

```python
{gated}```

`gate.linear(x)` multiplies `x` (batch · seq · hidden) with the weight of `gate_proj` (ffn · hidden). The result has the shape
batch · seq · ffn, in the dtype of the weights, {dtype}. It has no data: it is a size on a log, allocated at this moment.

## 3. Autograd keeps it

`act` is SiLU. The derivative of SiLU needs SiLU's input, so PyTorch saves the input for backward
(torch `tools/autograd/derivatives.yaml`). That input is the output of `gate_proj`. The op in `memcalc/core/ops` saves it too.
The tensor is therefore alive from this layer's forward to this layer's backward. Nobody wrote this lifetime down. The graph
holds the last reference, and the bytes are free when the reference is dropped, as in PyTorch.

## 4. The row

Every layer makes such a tensor, and equal layers share one row:

| component | name | formula | bytes |
|---|---|---|---|
| saved activations | `{tensor}` | {formula} | {nbytes:,} |

That is {per_layer:,} bytes in each of {layers} layers, {gib:.2f} GiB in all. The basis of the row is *{basis}*: the size follows
from shapes and PyTorch's rules, and the tests compare it with the real code. Its source:

> {source}

memcalc does not run {layers} layers. It runs a few, and writes the middle ones out at the real depth
([the profile](profile.md)). A test holds the two ways equal.

## 5. The component

`saved_activations` is the sum of all rows that are alive at the end of forward because backward needs them:

| row | bytes |
|---|---|
{saved}
| **saved activations** | **{saved_total:,}** |

## 6. The peak

At the moment with the most bytes, which is in {phase}, this row has {at_peak:,} bytes alive. The peak is the sum over all
components of what is alive at that moment:

| component | most in the step | at the peak |
|---|---|---|
{components}
| **peak** | | **{peak:,}** |

The peak is later than the end of forward. The loss has begun its backward and holds gradients of the logits, and no layer
has freed its saved activations yet.

## 7. From tensors to the GPU

The rows so far are tensors. What a GPU shows is more, and each difference is a row of its own:

| row | bytes | basis | source |
|---|---|---|---|
{overheads}

| number | bytes | what it counts |
|---|---|---|
| peak | {peak:,} | tensors |
| allocated | {allocated:,} | what `torch.cuda.max_memory_allocated` counts |
| reserved | {reserved:,} | what the caching allocator holds |
| device | {device:,} | what nvidia-smi shows |

## 8. How it is checked

- Shapes and names of weights equal `named_parameters()` of transformers' model.
- The same step runs under torch's fake tensors in the tests. Saved bytes and the peak of every phase differ by 0 bytes.
- DeepSpeed's own engine runs over a fake process group in the tests, and its peaks and collectives are compared, too.

[docs/accuracy.md](accuracy.md) has every family, and runs on GPUs that others have published.
"""


def _rows(pairs: Iterable[tuple[str, int]]) -> str:
    return "\n".join(f"| `{name}` | {size:,} |" for name, size in pairs)


def page() -> str:
    """The text of docs/number.md."""
    report = memcalc.estimate(MODEL, **SETUP)
    config = json.loads(CONFIG.read_text(encoding="utf-8"))["config"]
    memory = report.to_dict()["memory"]
    saved = [item for item in report.items if item.component == "saved_activations"]
    row = next(item for item in saved if item.name == TENSOR)
    dims = dict(row.shape)
    at_peak = memory["at_peak"]
    return PAGE.format(
        model=MODEL,
        ffn=config["intermediate_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        batch=dims["batch"],
        seq=dims["seq"],
        mlp=inspect.cleandoc("\n" + inspect.getsource(Llama.mlp)) + "\n",
        gated="".join(line for line in inspect.getsource(gated).splitlines(keepends=True) if not line.startswith("@")),
        dtype=row.dtype,
        tensor=row.name,
        formula=row.formula,
        nbytes=row.nbytes,
        per_layer=row.nbytes // dims["layers"],
        gib=row.nbytes / 2**30,
        basis=row.basis,
        source=row.source,
        saved=_rows((item.name, item.nbytes) for item in saved),
        saved_total=memory["saved_activations"],
        phase=memory["peak_phase"],
        at_peak=row.at_peak,
        components="\n".join(
            f"| {name.replace('_', ' ')} | {f'{memory[name]:,}' if name in memory else ''} | {size:,} |"
            for name, size in at_peak.items()
        ),
        overheads="\n".join(
            f"| {item.component}: {item.name} | {item.nbytes:,} | {item.basis} | {item.source} |"
            for item in report.overheads
        ),
        **{name: memory[name] for name in ("peak", "allocated", "reserved", "device")},
    )

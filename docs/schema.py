"""docs/json.md: the keys of the JSON document, each with its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from memcalc.cli.main import build

COLLECTIVE = {
    "axis": "the mesh axis: dp, tp, pp, cp or ep",
    "collective": "all_reduce, all_gather, reduce_scatter, all_to_all, send, broadcast or reduce",
    "name": "what is sent",
    "phase": "forward, backward or step",
    "layer": "the layer that sends it, with `*` for equal layers; null if it belongs to no layer",
    "dtype": "the dtype on the wire",
    "group_size": "ranks of the group",
    "calls": "calls per optimizer step",
    "payload": "bytes of the full tensors that the calls of a step are made on",
    "wire": "bytes that this rank sends for them",
    "formula": "how the payload is made, in named dims",
    "basis": "exact, modelled, assumed, measured or traced",
    "source": "the file or paper that the row follows",
}
SECONDS = {
    "exposed": "communication that nothing hides: the step waits at least this long",
    "forward": "communication that can overlap with forward",
    "backward": "communication that can overlap with backward",
    "total": "the sum of the three",
}
PHASES = {
    "forward": "the most bytes alive during forward",
    "backward": "the most bytes alive during backward",
    "step": "the most bytes alive during the optimizer's step",
}
COMPONENTS = {
    "parameters": "weights as the engine holds them, shards or slices",
    "gradients": "the most gradients that exist at once",
    "optimizer_states": "the optimizer's states, fp32 master weights included",
    "saved_activations": "bytes alive at the end of forward because backward needs them",
    "buffers": "the batch, modules' buffers, and the engine's buckets and gathered weights",
}


def _under(prefix: str, keys: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}.{key}": meaning for key, meaning in keys.items()}


SECTIONS: dict[str, dict[str, str]] = {
    "model": {
        "schema_version": "the version of this document: 1. Keys are added, never renamed",
        "model": "what was estimated",
        "model.name": "the name or path that was given",
        "model.model_type": "the `model_type` of its configuration; null with `--params`",
        "model.parameters": "parameters of the whole model, tied weights once",
        "model.active_parameters": "parameters that one token goes through; fewer than all with routed experts",
        "model.trainable_parameters": "parameters that get a gradient",
        "model.layers": "layers of the model",
    },
    "memory": {
        "memory": "bytes of the reported rank: the one with the highest peak, unless `--pp-rank` names another",
        **_under("memory", COMPONENTS),
        "memory.phases": "the peak of each phase of the step",
        **_under("memory.phases", PHASES),
        "memory.peak_phase": "the phase with the highest peak; `rollout` if that is before the training step",
        "memory.rollout": "what comes before a step that trains on generated text (`--task grpo`); null for all others",
        **_under("memory.rollout", {
            "peak": "the most bytes in it", "peak_phase": "its highest phase", "phases": "the peak of each of its phases",
            "held": "the bytes that are alive in all of its phases", "items": "what else is alive at its peak",
        }),
        **_under("memory.rollout.phases[]", {"name": "what is done", "peak": "its peak"}),
        **_under("memory.rollout.items[]", {
            "name": "as of a row", "nbytes": "its bytes", "dtype": "as of a row", "basis": "as of a row",
            "source": "as of a row",
        }),
        "memory.peak": "the most bytes of tensors alive at any moment of a steady-state step",
        "memory.allocated": "what `torch.cuda.max_memory_allocated` counts",
        "memory.reserved": "what the caching allocator holds",
        "memory.device": "what nvidia-smi shows",
        "memory.at_peak": "what of each component is alive at the peak; sums to `memory.peak`",
        **_under("memory.at_peak", {**dict.fromkeys(COMPONENTS, "its bytes alive at the peak"),
                                    "temporaries": "everything else that is alive at the peak"}),
        "memory.rank": "which rank is reported",
        "memory.rank.pp": "its pipeline rank",
        "memory.rank.cp": "its context-parallel rank; only where ranks that share a sequence differ",
        "memory.host": "what the ranks of the fullest node keep on the host between steps, in bytes; 0 without offload",
        "memory.host.pinned": "in page-locked memory, with what its allocator rounds up",
        "memory.host.paged": "in other memory",
        "memory.host.nvme": "in files",
        "memory.host_items": "the rows of the host; those of a kind sum to its bytes",
        **_under("memory.host_items[]", {
            "kind": "pinned, paged or nvme", "name": "what it is", "nbytes": "bytes of all ranks of the node",
            "blocks": "how many blocks", "dtype": "of the elements; '' for what is rounded up", "life": "when it exists",
            "formula": "its bytes, in words and numbers", "basis": "as of a row", "source": "as of a row",
        }),
        "memory.ranks": "every pipeline rank, first to last",
        **_under("memory.ranks[]", {
            "pp": "the pipeline rank", "layers": "layers that it holds",
            "in_flight": "forwards of a chunk that are saved at once, the running one included",
            **COMPONENTS, "phases": "the peak of each phase", "peak_phase": "the phase with the highest peak",
            "peak": "the rank's peak", "device": "what nvidia-smi shows for it",
            "communication": "what it sends in a step",
        }),
        **_under("memory.ranks[].phases", PHASES),
        **_under("memory.ranks[].communication", {
            "payload": "bytes of the full tensors", "wire": "bytes that it sends",
            "seconds": "the time of its communication; null without a named GPU, or where a link is unknown",
        }),
        **_under("memory.ranks[].communication.seconds", SECONDS),
        "memory.items": "the rows. A component's rows sum to it, and nothing is in a total that is not a row",
        **_under("memory.items[]", {
            "component": "one of the five components, `temporaries`, or `allocator`, `reserved`, `device`",
            "name": "the tensor, with `*` for equal layers",
            "nbytes": "bytes, all equal layers together",
            "at_peak": "its bytes alive at the peak",
            "shape": "pairs of a dim's name and its size",
            "dtype": "dtype of the elements",
            "life": "when it is alive: always, forward to backward, …",
            "formula": "how its bytes are made, in named dims and then in numbers",
            "basis": "exact, modelled, assumed, measured or traced",
            "source": "the file or paper that the row follows",
        }),
    },
    "communication": {
        "communication": "what the reported rank sends",
        "communication.per_step": "the sum over an optimizer step",
        **_under("communication.per_step", {
            "payload": "bytes of the full tensors", "wire": "bytes that this rank sends",
            "seconds": "the time of it; null without a named GPU, or where a link is unknown",
        }),
        **_under("communication.per_step.seconds", SECONDS),
        "communication.per_layer": "one layer's part",
        **_under("communication.per_layer", {"payload": "bytes of the full tensors", "wire": "bytes that this rank sends"}),
        "communication.per_layer_items": "one layer's part of each collective",
        **_under("communication.per_layer_items[]", {
            **{key: COLLECTIVE[key] for key in ("axis", "collective", "name", "phase")},
            "layers": "layers of the rank that have such a part; 0 between stages",
            "calls": "calls for one layer; a fraction where a call serves several layers",
            "payload": "bytes for one layer", "wire": "bytes that this rank sends for one layer",
            "formula": "how the payload is made, in named dims",
        }),
        "communication.items": "the collectives of a step",
        **_under("communication.items[]", {
            **COLLECTIVE,
            "overlap": "the phase whose compute it can hide behind; null if the step waits for it",
            "link": "the link that limits it",
            "seconds": "its time; null without a named GPU, or where the link is unknown",
            "seconds_formula": "how the time is made, or what is missing for one",
        }),
        "communication.textbook": "the same step as textbooks have it, where the engine does otherwise; else empty",
        **_under("communication.textbook[]", COLLECTIVE),
    },
    "compute": {
        "compute": "FLOPs of the matrix products of a step on the reported rank; null with `--params`",
        "compute.per_step": "their sums",
        **_under("compute.per_step", {
            "forward": "FLOPs of forward", "backward": "FLOPs of backward",
            "recomputation": "FLOPs that run again in backward", "total": "the sum of the three",
        }),
        "compute.items": "the products",
        **_under("compute.items[]", {
            "name": "the module that multiplies", "phase": "forward, backward or recomputation",
            "layer": "the layer, with `*` for equal layers", "kind": "the kind of product: matmul, attention, …",
            "dtype": "dtype of the operands", "calls": "calls per optimizer step", "flops": "FLOPs per optimizer step",
            "formula": "how they are made, in named dims", "basis": "exact, modelled or traced",
            "source": "the rule of counting",
        }),
        "compute.seconds_at_peak": "the FLOPs at the data sheet's dense rates: a lower bound; null without a named GPU",
    },
    "time": {
        "time": "the time of a step; null without a named GPU, with `--params`, or where a part of it is not known",
        "time.seconds_per_step": "seconds of an optimizer step",
        "time.low": "seconds_per_step by the published run of the same kind that was fastest against its estimate",
        "time.high": "the same by the slowest",
        "time.published_runs": "the number of these runs; 0: they are fewer than five, and the range is that of other kinds too",
        "time.breakdown": "where the seconds go; they add up to seconds_per_step",
        **_under("time.breakdown", {
            "compute": "forward and backward, and waiting for the CPU to start kernels", "recompute": "recomputation",
            "exposed_communication": "collectives that no compute hides", "bubble": "waiting for other stages",
            "optimizer": "the optimizer's step",
        }),
        "time.tokens_per_second": "tokens of all GPUs", "time.tokens_per_second_per_gpu": "tokens of one GPU",
        "time.mfu": "FLOPs of forward and backward, attention over the whole square, over the dense 16-bit rate (PaLM's MFU)",
        "time.hfu": "the same with recomputation, that of scores by fused attention included",
        "time.items": "the kernels and collectives of a step, and what it waits for",
        **_under("time.items[]", {
            "name": "the module with its op, or the collective", "part": "forward, backward, recomputation, optimizer, "
            "communication, bubble or launch", "seconds": "of all calls", "hidden": "seconds that compute hides",
            "bound": "what limits it: flops, bandwidth, latency or link", "calls": "calls in a step",
            "formula": "how the time is made", "basis": "measured, modelled, assumed or given",
            "source": "where the speed comes from",
        }),
    },
    "fit": {
        "fit": "the verdict; null without `--gpu`",
        "fit.gpu": "the GPU",
        "fit.capacity": "bytes that a process can use on it",
        "fit.fits": "true or false; null where it is not known (`--params`)",
        "fit.headroom": "capacity less what decides; negative where it does not fit; null where it is not known",
        "fit.margin": "bytes by which `device` may be too low, by the errors on published runs",
        "fit.rank": "the pipeline rank that decides",
        "fit.answer": "`fits`, `tight`, `expandable`, `uncertain`, `no` or `unknown`: see [verdicts](allocator.md#the-verdict)",
        "fit.needs": "the bytes that decide",
        "fit.why": "sentences on what the answer rests on",
    },
    "advice and notes": {
        "advice": "changes of the setup that help, best first; empty without a verdict or with enough room",
        **_under("advice[]", {
            "flags": "the options of the command line", "fits": "whether it then fits",
            "answer": "the answer then, as `fit.answer`",
            "gives_back": "whether the allocator then has to free cached segments",
            "device": "what nvidia-smi would then show", "headroom": "bytes to spare then", "peak": "the peak then",
            "saves": "bytes that it saves", "costs": "what it costs, in words",
        }),
        "notes": "sentences: what was chosen by default, and what the numbers leave out",
    },
}  # fmt: skip
"""Every key by its path, but for those of `setup`; `[]` is each element of a list."""

DECISIONS: dict[str, tuple[str, dict[str, str]]] = {
    "compare": (
        "`memcalc compare … --json`. `model`, `setup`, `memory`, `communication`, `time` and `fit` of a column are those\n"
        "of its estimate, and null for a refused setup.",
        {
            "varied": "the options with several values, with underscores",
            "columns": "the setups; the last option changes fastest",
            **_under("columns[]", {
                "values": "the varied options of this setup",
                "model": "as above", "setup": "as above", "memory": "as above", "communication": "as above",
                "time": "as above", "fit": "as above",
                "cost": "the cost of a step; null without `--price`, or where its time is not known",
                "error": "why the setup is refused, in one line; null if it is not",
            }),
            **_under("columns[].cost", {
                "price_per_gpu_hour": "the price that was given", "gpu_hours_per_step": "hours of all GPUs",
                "per_step": "the sum of the items", "per_billion_tokens": "null for a model without sequences",
                "items": "the cost of each part of the step's time",
            }),
            **_under("columns[].cost.items[]", {
                "name": "a part of `time.breakdown`", "gpu_hours": "hours of all GPUs", "cost": "at the given price",
            }),
        },
    ),
    "compare --deepspeed-table": (
        "`memcalc compare … --deepspeed-table --json`: [DeepSpeed's tables](compare.md#deepspeeds-tables).",
        {
            "additional_buffer_factor": "the factor of DeepSpeed's default by which the host's bytes are multiplied",
            "deepspeed_tables": "a table for each model, number of GPUs and ZeRO stage",
            **_under("deepspeed_tables[]", {
                "model": "its name", "total_params": "parameters; tied ones count once",
                "largest_layer_params": "parameters of the module that itself holds the most",
                "nodes": "hosts", "gpus_per_node": "GPUs of each", "zero": "2 or 3",
                "needs": "the lines of the table, in DeepSpeed's order",
            }),
            **_under("deepspeed_tables[].needs[]", {
                "offload_optimizer": "whether the optimizer is on the host", "offload_param": "whether the weights are",
                "zero_init": "whether the model is built under `deepspeed.zero.Init`; null for ZeRO-2",
                "cpu": "bytes of each host", "gpu": "bytes of each GPU",
            }),
        },
    ),
    "fit": (
        "`memcalc fit … --json`. `model`, `setup`, `memory` and `fit` are those of the value's estimate; if nothing fits, of\n"
        "the value that comes closest, and `advice` has what would help.",
        {
            "solve": "the quantity",
            "value": "the largest value that fits, for gpus the smallest; null if nothing fits",
            "next": "the next value, which does not fit, or if nothing fits the closest; null if memory is not the limit",
            **_under("next", {
                "value": "the value", "over_by": "bytes that are missing; 0 if only the estimate's error is",
                "answer": "its verdict, as `fit.answer`",
                "row": "the row that grows most, or if nothing fits the largest: as `memory.items[]`, and",
            }),
            "next.row.grows_by": "bytes that it has more than in the step of `value`",
            "limit": "the limit in words if it is not memory; else null",
            "tried": "values behind the next one that were tried; others are not searched",
            "also_fits": "those of `tried` that fit, after a gap",
        },
    ),
    "fit --ladder": (
        "`memcalc fit … --ladder --json`. `setup`, `memory`, `time` and `fit` of a rung are those of its estimate, and null\n"
        "for a refused one; `model` is as above.",
        {
            "first_fit": "the place of the lowest rung that fits, from 0; null if none does",
            "ladder": "the setup as given, then the rungs in their order",
            **_under("ladder[]", {
                "name": "what the rung does", "adds": "the options that it sets",
                "flags": "all options that differ from those given, up to this rung",
                "setup": "as above", "memory": "as above", "time": "as above", "fit": "as above",
                "saves": "bytes that it saves over the rung before, of `saves_of`; null for the first and for a refused one",
                "saves_of": "`device`; `allocated` where fragments are assumed on one of both rungs and played on the other",
                "takes": "the time of a step over that of the setup as given; null where one of both is not known",
                "error": "why the rung is refused, in one line; null if it is not",
            }),
        },
    ),
}  # fmt: skip
"""The keys of the documents of other commands, each with the document's description; keys of an estimate are left out."""

HEAD = """# The JSON document

Written by `docs/generate.py`. `memcalc estimate … --json` prints one JSON document and nothing else; `Report.to_dict()` returns
the same in Python. All sizes are integer bytes, FLOPs are integers, times are seconds. A key ends with `[]` where it stands for
every element of a list. Every key is always present, but for the keys of an object that is null, and where it says "only".

```sh
memcalc estimate --model llama-7b --zero 3 --gpus 8 --json
```
"""


def setup_keys() -> dict[str, str]:
    """The keys of `setup` with the help of their options."""
    command: Any = typer.main.get_command(build(["estimate"]))
    command = getattr(command, "commands", {"estimate": command})["estimate"]
    return {f"setup.{parameter.name}": parameter.help for parameter in command.params if parameter.help}


def described() -> dict[str, str]:
    """Every key of the document outside `setup`, with its meaning."""
    return {key: meaning for keys in SECTIONS.values() for key, meaning in keys.items()}


def page(setup: dict[str, Any]) -> str:
    """The text of docs/json.md; `setup` is that of a document."""
    return "\n".join([*HEAD.splitlines(), *_lines(setup), *_decisions()]) + "\n"


def _decisions() -> Iterator[str]:
    for name, (text, keys) in DECISIONS.items():
        yield from ("", f"## {name.capitalize()}", "", text, "", "| key | meaning |", "|---|---|")
        yield from (f"| `{key}` | {meaning} |" for key, meaning in keys.items())


def _lines(setup: dict[str, Any]) -> Iterator[str]:
    for name, keys in SECTIONS.items():
        yield from ("", f"## {name.capitalize()}", "", "| key | meaning |", "|---|---|")
        yield from (f"| `{key}` | {meaning} |" for key, meaning in keys.items())
        if name == "model":
            yield from ("", "## Setup", "", "Every option as it was resolved, defaults included.", "")
            yield from ("| key | option |", "|---|---|")
            helps = setup_keys()
            yield from (f"| `setup.{key}` | {helps[f'setup.{key}']} |" for key in setup)

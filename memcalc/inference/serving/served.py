"""A run as a serving engine has it: what the engine reserves of the GPU, and how many sequences fit at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.errors import InputError
from memcalc.inference.caches import DynamicCache, windows_of
from memcalc.inference.heights import KV, STATE, On, highest
from memcalc.inference.options import DTYPES, graph_bytes, kv_dtype_of
from memcalc.inference.quantised_formats import GPTQ, MARLIN_GROUPS
from memcalc.inference.serving import sglang, vllm
from memcalc.inference.serving.graphs import AT_LEAST, STATIC_OUTPUT, vllm_graphs
from memcalc.inference.serving.without_scores import without_scores
from memcalc.inference.steps import Workload, prefill

if TYPE_CHECKING:
    from memcalc.core.tensor import StorageRow
    from memcalc.inference.report import Inferred
    from memcalc.inference.serving.graphs import Graphs
    from memcalc.inference.serving.sglang import Reserve
    from memcalc.inputs.gpu import GPU

ENGINES: Final = ("transformers", "vllm", "sglang")
_FP32: Final = 4


class Serving(NamedTuple):
    """The answer of a serving engine, in bytes unless a name says otherwise."""

    engine: str
    share: float
    """`gpu_memory_utilization` of vLLM, `mem_fraction_static` of SGLang."""
    reserved: int
    """vLLM: all that it takes of the GPU; SGLang: weights and cache."""
    weights: int
    """The rank's weights, with vLLM's tables of rotary embeddings."""
    activations: int | None
    """vLLM: the peak of its profiling run; None: SGLang leaves the rest of the GPU for them."""
    outside: int
    """The CUDA context and NCCL."""
    cache: int
    """The bytes that are left for the cache; negative if nothing is."""
    tokens: int
    """vLLM's "GPU KV cache size", SGLang's `max_total_num_tokens`."""
    block_size: int
    """Tokens of a block of the group with most layers, or of a page."""
    num_blocks: int | None
    bytes_per_block: int | None
    blocks_per_sequence: int | None
    groups: tuple[int, ...]
    """The layers of each group of vLLM's blocks."""
    bytes_per_sequence: int
    """The cache's bytes of one sequence of the run's length."""
    max_concurrency: float
    """Sequences of the run's length that the cache holds, as vLLM prints them."""
    max_batch: int
    """The most sequences that the engine runs at once, whatever fits (`max_num_seqs`)."""
    sequences: int
    """The whole sequences of the run's length that run at once; at most so many if the graphs' bytes are not known."""
    graphs: Graphs | None = None
    """vLLM's CUDA graphs; None for SGLang."""
    reserve: tuple[Reserve, ...] = ()
    """The memory that SGLang leaves free by its own rule, by purpose; empty for vLLM."""

    left: int = 0
    """SGLang: the bytes that are neither weights nor cache."""

    @property
    def is_known(self) -> bool:
        """Tell whether a batch fits if the cache has room for it: vLLM's graphs are known, or SGLang leaves as much as its own
        rule."""
        if self.graphs is not None:
            return self.graphs.measured is not None
        return not self.is_tight

    @property
    def is_tight(self) -> bool:
        """Tell whether SGLang leaves less than the parts of its own rule add up to, by more than the rule's rounding: as it was
        asked to, or by its own fraction for a small GPU."""
        return self.left + self.left // 50 < sum(part.nbytes for part in self.reserve)

    def room_for_graphs(self, batch: int) -> int | None:
        """Return the bytes that graphs may take until a batch fits no longer; None if that is not open."""
        if self.is_known or self.graphs is None or not self.blocks_per_sequence or not self.bytes_per_block:
            return None
        graphs = sum(row.nbytes for row in self.graphs.rows if row.name in (AT_LEAST, STATIC_OUTPUT))
        return self.cache + graphs - (batch * self.blocks_per_sequence + 1) * self.bytes_per_block

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            **self._asdict(),
            "groups": list(self.groups),
            "graphs": None if self.graphs is None else self.graphs.to_dict(),
            "reserve": [part._asdict() for part in self.reserve],
        }


def serving_of(inferred: Inferred) -> Serving | None:
    """Return the answer of the run's engine; None for transformers, or without a GPU."""
    gpu, asked = inferred.gpu, inferred.asked
    if asked.engine == "transformers" or gpu is None:
        return None
    return _vllm(inferred, gpu) if asked.engine == "vllm" else _sglang(inferred, gpu)


def check_served(inferred: Inferred) -> None:
    """Raise InputError for a model or an option that the run's engine does not take, GPU or not."""
    asked = inferred.asked
    if asked.engine == "transformers":
        return
    kv = kv_dtype_of(asked)
    if asked.kv_dtype != "auto" and kv.itemsize > 1 and kv is not DTYPES[asked.dtype]:
        raise InputError(
            f"--kv-dtype {asked.kv_dtype}: {asked.engine} keeps the model's dtype or fp8; allowed: auto, fp8, fp8_e5m2"
        )
    if kv.name == "int8":
        raise InputError(f"--kv-dtype int8: not modelled for {asked.engine}; allowed: auto, fp8, fp8_e5m2")
    if asked.engine == "vllm" and inferred.gpu is not None:
        vllm.check_computes_quantised(inferred.gpu, asked.quantize or "none", DTYPES[asked.dtype])
        if DTYPES[asked.dtype].name == "bf16":
            vllm.check_computes_bf16(inferred.gpu)
    made = None if inferred.method is None else inferred.method.format
    if asked.engine == "vllm" and isinstance(made, GPTQ) and made.group not in MARLIN_GROUPS:
        why = "vLLM runs GPTQ in Marlin alone and refuses other groups"
        raise InputError(f"--group-size {made.group}: {why}; allowed: {', '.join(map(str, MARLIN_GROUPS))}")
    if asked.pp > 1:
        raise InputError(f"--pp {asked.pp}: a pipeline of {asked.engine} is not modelled; allowed: 1")
    layers = vllm.layers_of(inferred.model, asked.engine)
    if asked.engine == "vllm":
        vllm.specs(inferred.model, layers, DTYPES[asked.dtype], kv, asked.tp, asked.block_size)
    else:
        sglang.pool(inferred.model, layers, 0, kv, asked.tp)


def _length(inferred: Inferred) -> int:
    asked = inferred.asked
    assert asked.prompt_len is not None and asked.new_tokens is not None
    return asked.prompt_len + asked.new_tokens


def _vllm(inferred: Inferred, gpu: GPU) -> Serving:
    model, asked = inferred.model, inferred.asked
    dtype, kv = DTYPES[asked.dtype], kv_dtype_of(asked)
    share = vllm.UTILIZATION if asked.gpu_memory_utilization is None else asked.gpu_memory_utilization
    batch, length = vllm.batching(gpu), _length(inferred)
    tables = sum(row.nbytes for row in vllm.rotary_rows(model, dtype))
    outside = sum(item.nbytes for item in inferred.outside)
    activations = profile_peak(inferred, min(batch.tokens, batch.sequences * length), batch.sequences)
    requested = vllm.requested(gpu, share)
    hidden: Dim = getattr(model.program, "hidden")  # noqa: B009
    found = vllm_graphs(gpu, batch, hidden, dtype, graph_bytes(asked.cuda_graph_memory))
    budget = vllm.Budget(requested, inferred.weights + tables, activations, outside, found.known)
    work = vllm.workload(model, length, batch)
    of = vllm.specs(model, vllm.layers_of(model, "vllm"), dtype, kv, asked.tp, asked.block_size)
    plan = vllm.planned(of, budget.cache, work)
    widest = max(plan.groups, key=lambda group: len(group.layers))
    return Serving(
        engine="vllm",
        share=share,
        reserved=requested,
        weights=budget.weights,
        activations=activations,
        outside=outside,
        cache=budget.cache,
        tokens=plan.tokens(length),
        block_size=widest.spec.block_size,
        num_blocks=plan.num_blocks,
        bytes_per_block=plan.bytes_per_block,
        blocks_per_sequence=plan.blocks_per_sequence,
        groups=tuple(len(group.layers) for group in plan.groups),
        bytes_per_sequence=plan.blocks_per_sequence * plan.bytes_per_block,
        max_concurrency=plan.max_concurrency,
        max_batch=batch.sequences,
        sequences=min(plan.sequences, batch.sequences),
        graphs=found,
    )


def _sglang(inferred: Inferred, gpu: GPU) -> Serving:
    model, asked = inferred.model, inferred.asked
    layers, length = vllm.layers_of(model, "sglang"), _length(inferred)
    latent = any(layer.kind == "latent" for layer in layers)
    share = asked.mem_fraction_static
    if share is None:
        share = sglang.fraction(gpu, sglang.chunks(gpu, asked.tp), latent=latent, tp=asked.tp)
    reserve = sglang.reserves(gpu, sglang.chunks(gpu, asked.tp), latent=latent, tp=asked.tp)
    outside = sum(item.nbytes for item in inferred.outside)
    reserved = sglang.static(gpu, outside, share)
    cache = reserved - inferred.weights
    page = asked.block_size or 1
    pool = sglang.pool(model, layers, cache, kv_dtype_of(asked), asked.tp, page)
    most = sglang.most_requests(pool, length)
    fit = pool.sequences(length)
    return Serving(
        engine="sglang",
        share=share,
        reserved=reserved,
        weights=inferred.weights,
        activations=None,
        outside=outside,
        cache=cache,
        tokens=pool.tokens or pool.sliding_tokens,
        block_size=page,
        num_blocks=None,
        bytes_per_block=None,
        blocks_per_sequence=None,
        groups=(),
        bytes_per_sequence=pool.nbytes(length),
        max_concurrency=pool.tokens / length if pool.tokens else float(fit),
        max_batch=most,
        sequences=min(fit, most),
        reserve=reserve,
        left=gpu.capacity - outside - reserved,
    )


def profile_peak(inferred: Inferred, tokens: int, sequences: int) -> int:
    """Return the peak of a forward of `tokens` tokens without a cache, as transformers' modules have it, or of the logits of
    `sequences` of them with a copy in fp32, whichever is more (v1/worker/gpu/model_runner.py, profile_run). vLLM's kernels make
    neither scores nor masks, whatever attention transformers has for the family."""
    program, asked = inferred.run.program, inferred.asked
    dtype = DTYPES[asked.dtype]
    limit = program.positions_limit or tokens
    each = min(tokens, limit)
    batch = -(-tokens // each)
    logits = min(sequences, tokens) * _vocabulary(inferred) * (dtype.itemsize + _FP32)
    windows, full = windows_of(program)
    assert asked.attention is not None
    work = Workload(dtype, asked.attention, Dim("batch", batch, (0, 0, 0, 1, 0, 0)), each)
    scale = inferred.scale(batch)

    def size(row: StorageRow) -> int:
        return 0 if row.component in (KV, STATE) else scale.nbytes(row)

    on = On(without_scores(prefill(program, work, DynamicCache(windows, full))), inferred.stage)
    return max(logits, highest(on, size).nbytes)


def _vocabulary(inferred: Inferred) -> int:
    return int(getattr(inferred.model.program.config, "vocab_size", 0))

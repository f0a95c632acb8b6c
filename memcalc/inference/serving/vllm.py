"""vLLM on one GPU: what its layers cache, and the memory that its rules leave for the cache (vllm 0.33).

    cache = ceil(utilization · GPU) − weights − peak of the profiling run − outside torch − CUDA graphs

(v1/worker/gpu_worker.py, determine_available_memory; v1/worker/utils.py, request_memory). The profiling run is a forward of
`max_num_batched_tokens` tokens. vLLM measures the graphs by capturing some; no rule gives their bytes.
"""

from __future__ import annotations

from math import ceil, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.rows import Row
from memcalc.errors import InputError
from memcalc.inference.layers import cache_layers
from memcalc.inference.serving.blocks import Plan, Spec, Workload, plan
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.dtypes import DType
    from memcalc.inference.layers import CacheLayer, State
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model

UTILIZATION: Final = 0.92
"""The default of --gpu-memory-utilization (config/cache.py); 0.9 before."""
BLOCK: Final = 16
"""The tokens of a block (CacheConfig.DEFAULT_BLOCK_SIZE)."""
LATENT_BLOCK: Final = 64
"""The tokens of a block of latents, for which FlashMLA has kernels."""
_HYBRID_LATENT_BLOCK: Final = 128
_AMPERE: Final = 8
"""The major compute capability from which on GPUs compute in bf16."""
_BATCHES: Final = 2
"""The batches that are under way at once with asynchronous scheduling, the default."""
_NOT_SERVED: Final = frozenset({"bart", "ctrl", "minimax", "openai-gpt", "recurrent_gemma", "resnet", "rwkv", "t5"})
"""Generating types that vLLM has no cache for (model_executor/models/registry.py), or has dropped."""
_MAMBA2: Final = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"})
"""Types whose recurrent layers keep a third state of a sequence, a checkpoint of its prompt (mamba_mixer2.py)."""
_SSM_DTYPES: Final = {
    "nemotron_h": "mamba_ssm_cache_dtype",
    "qwen3_5_text": "mamba_ssm_dtype",
    "qwen3_5_moe_text": "mamba_ssm_dtype",
}
"""The field that has the dtype of the recurrent state, where it is not the model's (model_executor/models/config.py)."""


class Batching(NamedTuple):
    """The limits of a batch."""

    tokens: int
    """`max_num_batched_tokens`: those of a forward, and of the profiling run."""
    sequences: int
    """`max_num_seqs`."""


class Budget(NamedTuple):
    """The memory of one GPU, in bytes, as vLLM divides it."""

    requested: int
    weights: int
    activations: int
    """The peak of the profiling run above the weights."""
    outside: int
    """The CUDA context, NCCL and others outside torch."""
    graphs: int

    @property
    def cache(self) -> int:
        """Return what is left for the cache; negative if nothing is."""
        return self.requested - self.weights - self.activations - self.outside - self.graphs


def batching(gpu: GPU) -> Batching:
    """Return the defaults of `vllm serve` on a GPU (engine/arg_utils.py, get_batch_defaults)."""
    if gpu.capacity >= 160 * GIB:
        return Batching(16384, 1024)
    if gpu.capacity >= 70 * GIB and "a100" not in gpu.full_name.lower():
        return Batching(8192, 1024)
    return Batching(2048, 256)


def requested(gpu: GPU, utilization: float) -> int:
    """Return the bytes that vLLM takes of a GPU. Raises InputError if the utilization is no share of it."""
    if not 0 < utilization <= 1:
        raise InputError(f"--gpu-memory-utilization {utilization:g}: expected a number above 0, up to 1")
    return ceil(gpu.capacity * utilization)


def specs(
    model: Model,
    layers: Sequence[CacheLayer],
    dtype: DType,
    kv_dtype: DType,
    tp: int = 1,
    block_size: int | None = None,
) -> tuple[Spec, ...]:
    """Return what each layer caches on one of `tp` ranks. Raises InputError for models that vLLM does not serve, and for
    heads that the ranks cannot share."""
    if model.model_type in _NOT_SERVED:
        raise InputError(f"--engine vllm: a {model.model_type} is not served by vLLM; allowed: transformers")
    if block_size is not None and block_size % BLOCK:
        raise InputError(f"--block-size {block_size}: expected a multiple of {BLOCK}")
    latent = any(layer.kind == "latent" for layer in layers)
    block = block_size or (LATENT_BLOCK if latent else BLOCK)
    token = max((_token(model, layer, kv_dtype, tp) for layer in layers if layer.kv_heads), default=0)
    state = max((_state_bytes(model, layer.states, dtype, tp) for layer in layers if layer.states), default=0)
    if (
        token and state
    ):  # pages of attention at least as large as a state (platforms/interface.py, _align_hybrid_block_size)
        step = max(block, _HYBRID_LATENT_BLOCK) if latent else block
        block = max(block, step * ceil(state / (step * token)))
    page = block * token if token and state else 0
    return tuple(_of_layers(model, layers, dtype, kv_dtype, tp, block, page))


_OLDEST: Final = {"mxfp4": 8.0, "fp8": 7.5}
"""The first compute capability of NVIDIA that vLLM takes, by the quantisation of weights
(model_executor/layers/quantization)."""


def layers_of(model: Model, engine: str) -> tuple[CacheLayer, ...]:
    """Return what each layer of a model keeps. Raises InputError for a decoder behind an encoder, which is not modelled here."""
    if not model.program.one_stack:
        raise InputError(
            f"--engine {engine}: caches of a {model.model_type} in blocks are not modelled; allowed: transformers"
        )
    return cache_layers(model.program)


def workload(model: Model, length: int, batch: Batching, encoder: int = 0) -> Workload:
    """Return what decides the blocks of a sequence of `length` tokens. Prefix caching is on, but for models without
    attention."""
    attention_free = model.model_type in ("mamba", "mamba2", "falcon_mamba")
    states = 1 if attention_free else 3 if model.model_type in _MAMBA2 else 2
    return Workload(length, _BATCHES * min(batch.tokens, batch.sequences * length), states, encoder)


def check_computes_bf16(gpu: GPU) -> None:
    """Raise InputError for a GPU that vLLM does not run in bf16 (`check_if_supports_dtype`)."""
    major = gpu.compute_capability.partition(".")[0]
    if major.isdigit() and int(major) < _AMPERE:
        why = f"vLLM computes in bf16 from compute capability 8.0 up, and {gpu.name} has {gpu.compute_capability}"
        raise InputError(f"--dtype bf16: {why}; allowed: fp16, fp32")


def check_computes_quantised(gpu: GPU, quantize: str, dtype: DType) -> None:
    """Raise InputError for weights that vLLM does not load on a GPU or in a dtype (get_min_capability and
    get_supported_act_dtypes of its quantization configurations)."""
    if quantize == "mxfp4" and dtype.name != "bf16":
        raise InputError(f"--dtype {dtype.name}: vLLM runs weights in mxfp4 in bf16 alone; allowed: bf16")
    oldest = _OLDEST.get(quantize)
    found = gpu.compute_capability
    if oldest is not None and found.replace(".", "").isdigit() and float(found) < oldest:
        why = f"vLLM loads such weights from compute capability {oldest} up, and {gpu.name} has {found}"
        raise InputError(f"--quantize {quantize}: {why}; allowed: a newer --gpu, or --quantize none")


def rotary_rows(model: Model, dtype: DType) -> tuple[Row, ...]:
    """Return the tables of rotary embeddings that vLLM makes for all positions, one for each set of frequencies
    (layers/rotary_embedding/base.py). None for scaled frequencies whose tables have another length."""
    fields: Mapping[str, Any] = model.fields or {}
    limit: object = fields.get("max_position_embeddings")
    scaling: object = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    said = cast("dict[str, object]", scaling) if isinstance(scaling, dict) else {"rope_type": "unknown"}
    if not isinstance(limit, int) or said.get("rope_type", said.get("type", "default")) not in ("default", "llama3"):
        return ()
    source = "vllm 0.33 layers/rotary_embedding/base.py"
    made: dict[str, Row] = {}
    for buffer in model.program.buffers():
        if buffer.name.endswith("inv_freq") and "original" not in buffer.name:
            shape = Dim("positions", limit), Dim("rotary_dim", 2 * prod(dim.size for dim in buffer.shape))
            name = f"{buffer.name}: cos_sin_cache"
            made.setdefault(name, Row("buffers", name, shape, dtype, basis="modelled", source=source))
    return tuple(made.values())


def planned(of: Sequence[Spec], available: int, work: Workload) -> Plan:
    """Return the pool of blocks. Raises InputError for layers that vLLM cannot put together."""
    try:
        return plan(of, available, work)
    except ValueError as error:
        raise InputError(f"--engine vllm: {error}; allowed: transformers") from None


# --- what a layer caches


def _of_layers(
    model: Model, layers: Sequence[CacheLayer], dtype: DType, kv_dtype: DType, tp: int, block: int, page: int
) -> Iterator[Spec]:
    for layer in layers:
        if layer.kind != "recurrent":
            yield _attention(model, layer, kv_dtype, tp, block)
        if layer.states:
            state = _state_bytes(model, layer.states, dtype, tp)
            yield Spec("mamba", block, state=state, padded=page if page > state else 0)


def _attention(model: Model, layer: CacheLayer, kv_dtype: DType, tp: int, block: int) -> Spec:
    token = _token(model, layer, kv_dtype, tp)
    shape = (_heads(model, layer, tp), layer.k_width, layer.v_width)
    match layer.kind:
        case "sliding" | "chunked":
            return Spec(layer.kind, block, token, layer.window or 0, shape=shape)
        case "latent" | "cross":
            return Spec(layer.kind, block, token, shape=shape)
        case _:
            return Spec("full", block, token, shape=shape)


def _token(model: Model, layer: CacheLayer, kv_dtype: DType, tp: int) -> int:
    """Return the bytes of a token in one layer on one rank."""
    return _heads(model, layer, tp) * (layer.k_width + layer.v_width) * kv_dtype.itemsize


def _heads(model: Model, layer: CacheLayer, tp: int) -> int:
    """Return the heads that a rank caches: a latent whole, heads in equal parts, and one at least."""
    if layer.kind == "latent":
        return 1
    heads = kv_heads(model, layer)
    if heads % tp and tp % heads:
        raise InputError(f"--tp {tp}: {heads} heads of keys and values are neither a multiple nor a divisor of it")
    return max(1, heads // tp)


def kv_heads(model: Model, layer: CacheLayer) -> int:
    """Return the heads of keys and values of a layer. transformers' cache repeats Falcon's for all heads; vLLM's does not."""
    if model.model_type != "falcon":
        return layer.kv_heads
    config = model.program.config
    if getattr(config, "new_decoder_architecture", False):
        return int(getattr(config, "num_kv_heads", None) or getattr(config, "num_attention_heads", 0))
    return 1 if getattr(config, "multi_query", True) else layer.kv_heads


def _state_bytes(model: Model, states: Sequence[State], dtype: DType, tp: int) -> int:
    """Return the bytes of a layer's states on one rank. A convolution keeps one input fewer than its kernel has
    (mamba_utils.py), and both have the model's dtype unless a field says otherwise."""
    field = _SSM_DTYPES.get(model.model_type)
    said = None if field is None else (model.fields or {}).get(field, "float32")
    total = 0
    for state in states:
        elements = prod(state.shape)
        if elements % tp or state.shape[0] % tp:
            raise InputError(f"--tp {tp}: a state of {' x '.join(map(str, state.shape))} is not divisible by it")
        if state.name == "convolution":
            total += elements // state.shape[-1] * (state.shape[-1] - 1) // tp * dtype.itemsize
        else:
            total += elements // tp * (fp32 if said == "float32" else dtype).itemsize
    return total

"""Setup options of one engine or library, which `--help-all` lists at its end."""

from __future__ import annotations

from typing import Annotated

from memcalc.cli.options import KNOBS, option

CublasWorkspaceConfig = Annotated[
    str | None,
    option(
        "The job's environment variable CUBLAS_WORKSPACE_CONFIG, such as :4096:8. (default: torch's sizes for the GPU)",
        KNOBS,
        "--cublas-workspace-config",
    ),
]
TeWorkspaces = Annotated[
    int | None,
    option(
        "Transformer Engine's cuBLAS workspaces: 0 with --transformer-impl local, 1, or 5 with grouped products of experts; "
        "3 more with --tp-comm-overlap. (default: 1; with experts 5)",
        KNOBS,
        "--te-workspaces",
    ),
]
FlashAttentionVersion = Annotated[
    int | None,
    option(
        "The flash-attn of --attention flash in transformers' layers: 2, or 3 on Hopper. (default: 2)",
        KNOBS,
        "--flash-attention-version",
    ),
]
QuantizeStorage = Annotated[
    str | None,
    option(
        "The dtype of the tensors that hold 4-bit codes (bnb_4bit_quant_storage): uint8, fp32, bf16, fp16. FSDP shards those of "
        "the weights' own dtype. (default: the base's with fsdp2, else uint8)",
        KNOBS,
        "--quantize-storage",
    ),
]
ZeroQuantizedWeights = Annotated[
    bool,
    option("ZeRO-3 gathers weights as int8 codes (ZeRO++'s qwZ). (default: off)", KNOBS, "--zero-quantized-weights"),
]
ZeroQuantizedGradients = Annotated[
    bool,
    option(
        "ZeRO-3 reduces gradients between nodes as int4 codes (ZeRO++'s qgZ). (default: off)",
        KNOBS,
        "--zero-quantized-gradients",
    ),
]
ZeroHpzPartitionSize = Annotated[
    int | None,
    option(
        "Ranks that share ZeRO-3's second partition of the weights (ZeRO++'s hpZ). (default: 1, none)",
        KNOBS,
        "--zero-hpz-partition-size",
    ),
]
NvmeOptimizerBufferCount = Annotated[
    int | None,
    option(
        "Buffers of the host for --offload-optimizer nvme, each of the largest sub-group in fp32 (buffer_count of "
        "offload_optimizer). (DeepSpeed's default: 4)",
        KNOBS,
        "--nvme-optimizer-buffer-count",
    ),
]
NvmeBufferCount = Annotated[
    int | None,
    option(
        "Buffers of the host for --offload-params nvme (offload_param.buffer_count). (DeepSpeed's default: 5)",
        KNOBS,
        "--nvme-buffer-count",
    ),
]
NvmeBufferSize = Annotated[
    int | None,
    option(
        "Elements of each of those buffers (offload_param.buffer_size). (DeepSpeed's default: 100000000)",
        KNOBS,
        "--nvme-buffer-size",
    ),
]
NvmeMaxInCpu = Annotated[
    int | None,
    option(
        "Elements of a rank's weights that stay on the host with --offload-params nvme "
        "(offload_param.max_in_cpu). (DeepSpeed's default: 1000000000)",
        KNOBS,
        "--nvme-max-in-cpu",
    ),
]
NvmeThreads = Annotated[
    int | None,
    option(
        "Threads of a request to NVMe (aio.intra_op_parallelism); pieces are aligned to 1 KiB for each. "
        "(DeepSpeed's default: 1)",
        KNOBS,
        "--nvme-threads",
    ),
]
PrecisionAwareOptimizer = Annotated[
    bool,
    option(
        "Megatron's precision-aware optimizer: its states have the next three dtypes. (default: off)",
        KNOBS,
        "--precision-aware-optimizer",
    ),
]
MainParamsDtype = Annotated[
    str | None,
    option(
        "Its main weights: fp32 (of bf16 weights the lower 2 bytes alone), fp16. (default: fp32)",
        KNOBS,
        "--main-params-dtype",
    ),
]
ExpAvgDtype = Annotated[
    str | None,
    option("Its first moment: fp32, bf16, fp16, fp8. (default: fp32)", KNOBS, "--exp-avg-dtype"),
]
ExpAvgSqDtype = Annotated[
    str | None,
    option("Its second moment: fp32, bf16, fp16, fp8. (default: fp32)", KNOBS, "--exp-avg-sq-dtype"),
]
UseOrigParams = Annotated[
    bool | None,
    option(
        "FSDP1's optimizer sees the original parameters, not flat ones. (default: on, as with accelerate launch)",
        KNOBS,
        "--use-orig-params/--no-use-orig-params",
    ),
]
BackwardPrefetch = Annotated[
    str | None,
    option(
        "When FSDP1 gathers the layer of the next backward: pre, post, none. (default: pre)",
        KNOBS,
        "--backward-prefetch",
    ),
]
ForwardPrefetch = Annotated[
    bool | None,
    option(
        "FSDP1 gathers the next layer before a layer's forward. (default: off)",
        KNOBS,
        "--forward-prefetch/--no-forward-prefetch",
    ),
]
ReentrantCheckpoints = Annotated[
    bool | None,
    option(
        "With --recompute full: checkpoints re-enter autograd (use_reentrant=True), one graph for each layer. (default: off)",
        KNOBS,
        "--reentrant-checkpoints/--no-reentrant-checkpoints",
    ),
]
Servers = Annotated[
    int | None,
    option("Parameter servers beside the workers. (default: 1 with engine parameter-server)", KNOBS, "--servers"),
]
TpDims = Annotated[
    str | None,
    option(
        "Dimensions of the grid of tensor parallel ranks, as in Colossal-AI: 1, 2 (tp = q²), 2.5 (tp = d·q²), 3 (tp = l³). "
        "(default: 1)",
        KNOBS,
        "--tp-dims",
    ),
]
TpDepth = Annotated[
    int | None,
    option(
        "The squares d of --tp-dims 2.5. (default: the most with tp = d·q² and d up to q)",
        KNOBS,
        "--tp-depth",
    ),
]
AutoTp = Annotated[
    bool,
    option(
        "DeepSpeed's AutoTP cuts transformers' modules (tensor_parallel: autotp_size), not a GPTModel.",
        KNOBS,
        "--autotp",
    ),
]
StageLayers = Annotated[
    str | None,
    option(
        "Megatron: the layers of each stage with commas, in the model's order, such as 3,2,2,1. (default: equal stages)",
        KNOBS,
        "--stage-layers",
    ),
]
MicrobatchGroupSize = Annotated[
    int | None,
    option(
        "Megatron's interleaved schedule: the micro-batches that go through one chunk before the next chunk's turn. (default: "
        "the pipeline's ranks)",
        KNOBS,
        "--microbatch-group-size",
    ),
]
CpExchangeSize = Annotated[
    int | None,
    option(
        "With --cp-comm-type a2a+p2p: the ranks that exchange heads; keys and values go round the others.",
        KNOBS,
        "--cp-exchange-size",
    ),
]
WgradDeferralLimit = Annotated[
    int | None,
    option(
        "Megatron: the micro-batches whose gradient of the head's weight is computed when the pipeline is empty; 0: all. "
        "(default: at once)",
        KNOBS,
        "--wgrad-deferral-limit",
    ),
]
RecomputeModules = Annotated[
    str | None,
    option(
        "Megatron: the modules that --recompute selective runs again, with commas: core_attn, layernorm, mla_up_proj, mlp, moe, "
        "moe_act, shared_experts. (default: core_attn)",
        KNOBS,
        "--recompute-modules",
    ),
]
OffloadModules = Annotated[
    str | None,
    option(
        "Megatron: the modules whose saved tensors are moved to the host, with commas: attn_norm, qkv_linear, core_attn, "
        "attn_proj, mlp_norm, expert_fc1, moe_act. (default: none)",
        KNOBS,
        "--offload-modules",
    ),
]
Fp8Recipe = Annotated[
    str | None,
    option(
        "Megatron: linear layers multiply in fp8 by this recipe of Transformer Engine: delayed, tensorwise, blockwise, mxfp8. "
        "(default: none, in 16 bits)",
        KNOBS,
        "--fp8-recipe",
    ),
]
Fp8ParamGather = Annotated[
    bool,
    option("Weights of these layers are kept and gathered in fp8 alone. (default: off)", KNOBS, "--fp8-param-gather"),
]
CommHook = Annotated[
    str | None,
    option(
        "DDP's communication hook: fp16, bf16 (buckets are sent in it), powersgd, batched-powersgd. (default: none)",
        KNOBS,
        "--comm-hook",
    ),
]
PowerSgdRank = Annotated[
    int | None, option("The rank of PowerSGD's matrices. (default: 1, PowerSGDState's)", KNOBS, "--powersgd-rank")
]
CompressionPhase = Annotated[
    str | None,
    option(
        "The phase to report where communication is compressed after a warm-up: warmup, compressed. (default: compressed)",
        KNOBS,
        "--compression-phase",
    ),
]
EncoderStages = Annotated[
    int | None,
    option(
        "Pipeline ranks of the encoder, of an encoder and a decoder. (default: its part of all layers)",
        KNOBS,
        "--encoder-stages",
    ),
]
RewardModel = Annotated[
    str | None,
    option(
        "GRPO: the model that scores completions, like --model (reward_funcs). (default: none, functions score them)",
        KNOBS,
        "--reward-model",
    ),
]

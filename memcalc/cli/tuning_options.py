"""The setup options of fine-tuning: what trains, adapters, and what the host keeps."""

from __future__ import annotations

from typing import Annotated

from memcalc.cli.options import KNOBS, METHOD, option

Freeze = Annotated[
    str | None,
    option(
        "Parts that do not train, with commas: embeddings, head, norms, bias, attention, mlp, encoder, first:N, last:N, "
        "a pattern of parameter names, all-but:PART+PART. (default: all train)",
        METHOD,
        "--freeze",
    ),
]
LoraRank = Annotated[
    int | None,
    option("The rank of peft's LoRA adapters; the base is frozen. (default: 0, off)", METHOD, "--lora-rank"),
]
LoraTargets = Annotated[
    str | None,
    option(
        "default (peft's for the model type), all-linear, or names of linear layers with commas. (default: default)",
        METHOD,
        "--lora-targets",
    ),
]
LoraDropout = Annotated[float | None, option("Dropout of the adapters' inputs. (default: 0)", METHOD, "--lora-dropout")]
LoraBias = Annotated[
    str | None, option("The biases that train: none, all, lora_only. (default: none)", METHOD, "--lora-bias")
]
AdapterDtype = Annotated[
    str | None,
    option(
        "fp32 (peft's own), or the base's: bf16, fp16 (autocast_adapter_dtype=False). (default: fp32)",
        METHOD,
        "--adapter-dtype",
    ),
]
Dora = Annotated[
    bool,
    option(
        "DoRA: adapters with a magnitude for each output. Each forward computes lengths of whole weights. (default: off)",
        METHOD,
        "--dora",
    ),
]
ModulesToSave = Annotated[
    str | None,
    option(
        "Modules that train in whole beside adapters, as copies, with commas: lm_head,embed_tokens. (default: none)",
        METHOD,
        "--modules-to-save",
    ),
]
InputRequireGrads = Annotated[
    bool | None,
    option(
        "enable_input_require_grads() was called: the output of the embeddings requires a gradient though they do not train. "
        "(default: on with --recompute, as transformers' own switch does)",
        METHOD,
        "--input-require-grads/--no-input-require-grads",
    ),
]
BaseDtype = Annotated[
    str | None,
    option(
        "The dtype that the frozen base is loaded in: fp32, bf16, fp16. (default: the precision's; fp32 under autocast)",
        METHOD,
        "--base-dtype",
    ),
]
Quantize = Annotated[
    str | None,
    option(
        "none, nf4, fp4, int8: bitsandbytes keeps the weights of the frozen linear layers in 4 or 8 bits. (default: none)",
        METHOD,
        "--quantize",
    ),
]
DoubleQuant = Annotated[bool, option("The scales of quantised weights are quantised too.", METHOD, "--double-quant")]
QuantizeComputeDtype = Annotated[
    str | None,
    option(
        "The dtype that quantised weights are multiplied in (bnb_4bit_compute_dtype): fp32, bf16, fp16. (default: the "
        "precision's)",
        METHOD,
        "--quantize-compute-dtype",
    ),
]
PrepareKbitTraining = Annotated[
    bool,
    option(
        "peft's prepare_model_for_kbit_training was called: what is not quantised is fp32.",
        METHOD,
        "--prepare-kbit-training",
    ),
]
Task = Annotated[
    str | None,
    option(
        "What a step trains for, as TRL runs it: pretrain, sft, dpo, kto, ppo, grpo. (default: pretrain)",
        METHOD,
        "--task",
    ),
]
PrecomputeReference = Annotated[
    bool | None,
    option(
        "The reference's log-probabilities were computed before training, so no reference model is on the GPU "
        "(precompute_ref_log_probs). (default: off)",
        METHOD,
        "--precompute-reference/--no-precompute-reference",
    ),
]
CompletionLen = Annotated[
    str | None,
    option(
        "GRPO and PPO: tokens of a generated completion, the last ones of --seq-len (max_completion_length, response_length). "
        "(default: 512, PPO 53, or half of a shorter sequence)",
        KNOBS,
        "--completion-len",
    ),
]
NumGenerations = Annotated[
    int | None, option("GRPO: completions of one prompt (num_generations). (default: 8)", KNOBS, "--num-generations")
]
StepsPerGeneration = Annotated[
    int | None,
    option(
        "GRPO: micro-batches whose completions are generated together (steps_per_generation). (default: those of a step)",
        KNOBS,
        "--steps-per-generation",
    ),
]
NumIterations = Annotated[
    int | None,
    option(
        "GRPO and PPO: how often a completion is trained on (num_iterations, num_ppo_epochs). (default: 1, PPO 4)",
        KNOBS,
        "--num-iterations",
    ),
]
Beta = Annotated[
    float | None,
    option(
        "GRPO: weight of the distance from a reference model (beta); 0 has none on the GPU. (default: 0)",
        KNOBS,
        "--beta",
    ),
]
RolloutBatchSize = Annotated[
    int | None,
    option(
        "PPO: completions that a rank generates and scores together (local_rollout_forward_batch_size). "
        "(default: 64, or a rank's batch if that is smaller)",
        KNOBS,
        "--rollout-batch-size",
    ),
]
NumMiniBatches = Annotated[
    int | None,
    option(
        "PPO: parts of a rank's batch, after each of which the trainer frees its variables (num_mini_batches). (default: 1)",
        KNOBS,
        "--num-mini-batches",
    ),
]
OffloadOptimizer = Annotated[
    str | None,
    option(
        "Where DeepSpeed's ZeRO keeps the optimizer's states and the fp32 weights: none (on the GPU), cpu, nvme. "
        "(default: none)",
        METHOD,
        "--offload-optimizer",
    ),
]
OffloadParams = Annotated[
    str | None,
    option(
        "Where ZeRO-3 and FSDP2 keep the weights that are not in use: none (on the GPU), cpu, nvme. (default: none)",
        METHOD,
        "--offload-params",
    ),
]
Packing = Annotated[
    bool,
    option(
        "Sequences are packed to --seq-len without padding, as TRL's SFTTrainer packs them (packing=True): flash-attn's kernels "
        "of variable lengths, or with --attention sdpa a mask of blocks.",
        KNOBS,
        "--packing",
    ),
]
OffloadActivations = Annotated[
    str | None,
    option(
        "Where saved activations are until backward needs them: none (on the GPU), cpu: in pinned memory, as TRL's "
        "activation_offloading=True moves them. (default: none)",
        KNOBS,
        "--offload-activations",
    ),
]
NeftuneAlpha = Annotated[
    float | None,
    option(
        "NEFTune: noise of this magnitude is added to the embeddings (neftune_noise_alpha). (default: no noise)",
        KNOBS,
        "--neftune-alpha",
    ),
]
Lengths = Annotated[
    str | None,
    option(
        "With --packing: the lengths of the sequences, each with its share (512:0.6,2048:0.4), or a file with one length a "
        "line. (default: each row is one sequence)",
        KNOBS,
        "--lengths",
    ),
]

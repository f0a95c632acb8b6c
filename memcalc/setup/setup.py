"""A setup: every option resolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from memcalc.core.dtypes import DType, bf16, fp16, fp32
from memcalc.quantized.chosen import base_dtype_name


class Setup(NamedTuple):
    """Every option of the contract as resolved. `attention`, `seq_len` and `cross_entropy` are None without a model."""

    gpus: int
    gpus_per_node: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    pp_rank: int | None
    """The pipeline rank that was asked for; None: the worst."""
    zero: int
    shard_group: int
    sequence_parallel: bool
    schedule: str
    virtual_stages: int
    first_stage_layers: int | None
    last_stage_layers: int | None
    micro_batch_size: int
    seq_len: int | None
    global_batch_size: int
    precision: str
    grad_dtype: str
    optimizer: str
    optimizer_implementation: str
    clip_grad_norm: bool
    recompute: str
    cp_comm_type: str | None
    """The way in which ranks of a sequence share keys and values, by Megatron's name; None if cp is 1."""
    recompute_layers: int | None
    """The number of recomputed layers of each stage, the first ones; None: all."""
    reduce_bucket_size: int | None
    """A size of DeepSpeed's in elements, like the next five. None with other engines, in a pipeline, or if the ZeRO
    stage does not use it.
    """
    max_live_parameters: int | None
    max_reuse_distance: int | None
    param_persistence_threshold: int | None
    prefetch_bucket_size: int | None
    sub_group_size: int | None
    overlap_comm: bool | None
    """True if DeepSpeed's ZeRO-2 reduces one bucket while backward fills another; None with other engines and stages but 1."""
    zero_quantized_weights: bool
    """True if ZeRO-3 gathers weights as int8 codes (ZeRO++'s qwZ)."""
    zero_quantized_gradients: bool
    """True if ZeRO-3 reduces gradients between nodes as int4 codes (qgZ)."""
    zero_hpz_partition_size: int
    """The ranks that share ZeRO-3's second partition of the weights (hpZ); 1: there is none."""
    nvme_optimizer_buffer_count: int | None
    """The host's buffers between files and the optimizer, each of a rank's largest sub-group. None, like the next four, if what
    they are for is not in files."""
    nvme_buffer_count: int | None
    """The host's buffers between files and the weights."""
    nvme_buffer_size: int | None
    """The elements of each of those."""
    nvme_max_in_cpu: int | None
    """The elements of a rank's weights that stay on the host and have no file."""
    nvme_threads: int | None
    """The threads of a request; what is read and written is aligned to a KiB for each."""
    precision_aware_optimizer: bool
    """True if Megatron's optimizer has states of the next three dtypes; these are None without it."""
    main_params_dtype: str | None
    exp_avg_dtype: str | None
    exp_avg_sq_dtype: str | None
    gradient_accumulation_fusion: bool | None
    """Megatron's switch, like the next one; None with another engine."""
    attention_mask_in_dataloader: bool | None
    sync_each_micro_batch: bool | None
    """True if DDP and FSDP reduce after every micro-batch; None if another engine or a pipeline's schedule decides."""
    use_orig_params: bool | None
    """True if FSDP1's optimizer sees the original parameters; None with another engine, as for the next two."""
    backward_prefetch: str | None
    """The time at which FSDP1 gathers the unit of the next backward: pre, post, none."""
    forward_prefetch: bool | None
    servers: int | None
    """The number of parameter servers; None with another engine."""
    cublas_workspace_config: str | None
    """The environment variable of this name, as given; None: torch's own sizes."""
    te_workspaces: int | None
    """The number of Transformer Engine's cuBLAS workspaces, as given; None: one for each of its streams."""
    comm_hook: str | None
    """The hook that DDP calls with a bucket instead of an all-reduce (`register_comm_hook`); None: nothing else."""
    powersgd_rank: int | None
    """The rank of PowerSGD's matrices; None without PowerSGD."""
    compression_phase: str | None
    """The phase of a run that is reported, if its communication is compressed after a warm-up: warmup, compressed."""
    attention: str | None
    cross_entropy: str | None
    padded: bool
    expert_imbalance: float
    kernels: str
    liger: str | None
    """The parts of Liger-Kernel that are on in layers, with commas; None with other kernels."""
    engine: str
    freeze: str | None
    """The parts whose weights do not train, as given; None: all train."""
    lora_rank: int
    """The rank of the adapters; 0: none. The next four are None without adapters."""
    lora_targets: str | None
    lora_dropout: float | None
    lora_bias: str | None
    adapter_dtype: str | None
    modules_to_save: str | None
    """The modules that train in whole beside adapters; None: none."""
    dora: bool
    """True if adapters have a magnitude for each output (`use_dora`)."""
    input_require_grads: bool
    """True if the output of the embeddings requires a gradient though its table does not train."""
    base_dtype: str | None
    """The dtype that the frozen weights are loaded in; None: the precision's, which is fp32 under autocast."""
    quantize: str
    """The codes of the frozen linear layers' weights: none, nf4, fp4."""
    double_quant: bool
    """True if the scales of quantised weights are quantised too."""
    quantize_compute_dtype: str | None
    """The dtype that quantised weights are multiplied in; None without them."""
    prepare_kbit_training: bool
    """True if peft has cast what is not quantised to fp32 (`prepare_model_for_kbit_training`)."""
    task: str
    precompute_reference: bool | None
    """True if the reference's log-probabilities were computed before training; None without a reference."""
    completion_len: int | None
    """The tokens of a generated completion, the last ones of a sequence. None, like the next four, if nothing is generated."""
    num_generations: int | None
    """The completions of one prompt."""
    steps_per_generation: int | None
    """The micro-batches whose completions are generated together."""
    num_iterations: int | None
    """How often a completion is trained on."""
    beta: float | None
    """The weight of the distance from a reference model; 0: there is none."""
    offload_optimizer: str
    """Where the engine keeps the optimizer's states and the fp32 weights: none (on the GPU), cpu, nvme."""
    offload_params: str
    """Where it keeps the weights that are not in use, by the same names."""
    gpu: str | None
    network_gbps: float | None
    """Gbit/s of one GPU's network in each direction; None: not known."""
    gemm_efficiency: float | None
    """The share of the data sheet's FLOPs that products reach, as given, like the next two; None: as measured or assumed
    for the GPU."""
    attention_efficiency: float | None
    """The share that fused attention reaches, with half of the square counted."""
    memory_efficiency: float | None
    """The share of the memory's bandwidth that other kernels reach."""
    tp_dims: str = "1"
    """The dimensions of the grid that tensor-parallel ranks form: 1, 2, 2.5 or 3."""
    tp_depth: int | None = None
    """The squares of ranks in two and a half dimensions; None in others."""
    autotp: bool = False
    """True if DeepSpeed's AutoTP cuts transformers' own modules."""
    packing: bool = False
    """True if each row of a micro-batch has several sequences, one after the other, without padding."""
    offload_activations: str = "none"
    """The place of the tensors that forward saves, until backward needs them: none (on the GPU), cpu."""
    neftune_alpha: float | None = None
    """The magnitude of the noise that is added to the embeddings (`neftune_noise_alpha`); None: no noise."""
    lengths: str | None = None
    """The lengths of the sequences of packed rows, as given; None: each row is one sequence."""
    quantize_storage: str | None = None
    """The dtype of the tensors that hold 4-bit codes (`bnb_4bit_quant_storage`); None without them."""
    encoder_stages: int | None = None
    """The pipeline ranks of the encoder, as given; None: its part of all layers, rounded."""
    reward_model: str | None = None
    """The model that scores completions, beside the policy; None: functions do."""
    stage_layers: str | None = None
    """The layers of each stage with commas, in the model's order; None: the stages are equal but for the first and the last."""
    microbatch_group_size: int | None = None
    """The micro-batches that go through one chunk before the next chunk's turn, with Megatron's interleaved schedule; None:
    as many as ranks."""
    cp_exchange_size: int | None = None
    """The ranks that exchange heads for tokens before keys and values go round the others; None with another cp_comm_type."""
    wgrad_deferral_limit: int | None = None
    """The micro-batches whose gradient of the head's weight Megatron computes after the last one (0: all); None: it computes
    each at once."""
    recompute_modules: str | None = None
    """The modules that Megatron's selective recomputation runs again, with commas; None: core attention."""
    offload_modules: str | None = None
    """The modules whose saved tensors Megatron moves to the host, with commas; None: they stay."""
    reentrant_checkpoints: bool = False
    """True if the checkpoints of recomputed layers re-enter autograd (`use_reentrant`)."""
    fp8_recipe: str | None = None
    """How Megatron's linear layers cast to fp8 for their products, by the name of Megatron's recipe; None: they do not."""
    fp8_param_gather: bool = False
    """True if the weights of these layers are kept and gathered in fp8 alone."""
    rollout_batch_size: int | None = None
    """The completions that PPO generates and scores together (`local_rollout_forward_batch_size`); None for other tasks."""
    num_mini_batches: int | None = None
    """The parts of PPO's batch, after each of which the trainer lets go of its variables; None for other tasks."""
    flash_attention_version: int | None = None
    """The flash-attn that transformers' layers run: 2 or 3; None: none."""

    @property
    def micro_batches(self) -> int:
        """Return the forward and backward passes per optimizer step."""
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def keeps_whole_gradients(self) -> bool:
        """Tell whether gradients stay as backward makes them until they are reduced with the last micro-batch's
        (`no_sync`)."""
        return self.sync_each_micro_batch is False and self.micro_batches > 1

    @property
    def sequence_parts(self) -> int:
        """Return the number of parts that a sequence is cut into. A tensor between two layers has one part."""
        chunks = 2 if self.shares_sequences else 1
        return chunks * self.cp * (self.tp if self.sequence_parallel else 1)

    @property
    def tokens_per_part(self) -> int:
        """Return the tokens of a sequence in a tensor between two layers on one rank. If fsdp2's ranks share sequences,
        that is one of a rank's two chunks."""
        return (self.seq_len or 1) // self.sequence_parts

    @property
    def shares_sequences(self) -> bool:
        """Tell whether ranks share sequences by torch's context parallelism."""
        return self.engine == "fsdp2" and self.cp > 1

    @property
    def has_flash_attn(self) -> bool:
        """True if transformers' layers run flash-attn over rows of one length."""
        of_megatron = self.kernels == "megatron" or self.runs_gpt_model
        return self.attention == "flash" and not self.packing and not of_megatron

    @property
    def runs_gpt_model(self) -> bool:
        """Tell whether DeepSpeed's engine has slices of Megatron-DeepSpeed's GPTModel instead of transformers'
        module."""
        return self.engine == "deepspeed" and max(self.tp, self.pp) > 1 and not self.autotp

    @property
    def splits_layers(self) -> bool:
        """Tell whether an axis gives ranks parts of layers, of a sequence or of the experts."""
        return max(self.tp, self.cp, self.ep) > 1

    @property
    def averaging(self) -> int:
        """Return the number of ranks that average their gradients; those of a sequence do too."""
        return self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Return the number of ranks of a pipeline stage that have the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def shards(self) -> int:
        """Return the number of ranks that share what ZeRO shards."""
        return self.shard_group if self.zero else 1

    @property
    def is_zero_plus_plus(self) -> bool:
        """Tell whether a part of ZeRO++ is on."""
        return self.zero_quantized_weights or self.zero_quantized_gradients or self.zero_hpz_partition_size > 1

    @property
    def replicas(self) -> int:
        """Return the number of groups of ranks that each have all shards."""
        return self.dp * self.cp // self.shards

    @property
    def keeps_adapter_dtype(self) -> bool:
        """Tell whether adapters have a dtype of their own. DeepSpeed casts all weights, and FSDP2's units gather all in one
        dtype."""
        return self.lora_rank > 0 and self.engine in ("none", "ddp")

    @property
    def has_reference(self) -> bool:
        """Tell whether a reference model is on the GPU beside the policy. Adapters that are switched off need none."""
        has = self.precompute_reference is False or bool(self.beta) or self.task == "ppo"
        return has and not self.lora_rank

    @property
    def offloads(self) -> bool:
        """Tell whether the host keeps a part of the training state."""
        return (self.offload_optimizer, self.offload_params) != ("none", "none")

    @property
    def compute_dtype(self) -> DType:
        """Return the dtype of weights and of their gradients. Forward and backward run in it unless autocast casts."""
        if self.casts_weights:
            return DTYPES[self.precision.split("-")[0]]
        return fp32 if self.prepare_kbit_training else DTYPES[base_dtype_name(self)]

    @property
    def casts_weights(self) -> bool:
        """Tell whether the engine casts all weights to the precision's dtype, whatever they were loaded in: DeepSpeed does, and
        FSDP2's policy when it gathers them."""
        return self.engine == "deepspeed" or (self.engine == "fsdp2" and self.has_master_weights)

    @property
    def autocast_dtype(self) -> DType | None:
        """Return the dtype that torch.autocast casts to in forward; None if it is off."""
        return DTYPES[self.precision.split("-")[0]] if self.precision.endswith("-autocast") else None

    @property
    def has_master_weights(self) -> bool:
        """Tell whether an fp32 copy of 16-bit weights is kept."""
        return self.precision.endswith("-mixed")


DTYPES: Final[Mapping[str, DType]] = {"fp32": fp32, "bf16": bf16, "fp16": fp16, "fp8": bf16}

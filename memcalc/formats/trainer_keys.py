"""The names of the keys of transformers' TrainingArguments, and those of TRL that tell which trainer a file is for.

Source: transformers/training_args.py of 4.x and 5.23; trl/trainer and trl/experimental, the classes of configurations.
"""

from __future__ import annotations

from typing import Final

MATTER: Final = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "activation_checkpointing",
    "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "optim", "optim_args", "optim_target_modules",
    "max_grad_norm", "bf16", "fp16", "use_liger_kernel", "liger_kernel_config", "neftune_noise_alpha", "torch_compile",
    "fsdp", "fsdp_config", "deepspeed", "model_name_or_path", "torch_dtype", "attn_implementation", "max_length",
    "max_seq_length", "use_peft", "lora_r", "lora_target_modules", "load_in_4bit", "load_in_8bit", "packing",
)  # fmt: skip
"""Keys that change memory, communication or time. One that is nearly like them is a misspelling."""
OTHERS: Final = (
    "per_device_eval_batch_size", "per_gpu_train_batch_size", "per_gpu_eval_batch_size", "eval_accumulation_steps",
    "bf16_full_eval", "fp16_full_eval", "fp16_opt_level", "max_steps", "torch_compile_mode", "torch_compile_backend",
    "max_prompt_length", "max_completion_length", "max_target_length", "max_source_length", "lora_alpha", "lora_rank",
    "eval_packing", "use_liger", "use_lora", "max_seq_len", "dtype", "model_name", "lora_target", "fsdp_min_num_params",
    "lora_target_parameters", "max_new_tokens", "model_max_length", "min_length", "max_len", "model_id", "model_path",
)  # fmt: skip
"""Keys that resemble those without being misspelt."""
KNOWN: Final = (*MATTER, *OTHERS, "output_dir", "learning_rate", "num_train_epochs", "weight_decay", "warmup_steps",
    "warmup_ratio", "lr_scheduler_type", "logging_steps", "save_steps", "seed", "do_train", "stage")  # fmt: skip
"""Some of these are in any file of training arguments."""
BATCH: Final = ("per_device_train_batch_size", "per_gpu_train_batch_size")
RECOMPUTE: Final = ("activation_checkpointing", "gradient_checkpointing")
SFT: Final = (
    "packing", "packing_strategy", "padding_free", "dataset_text_field", "completion_only_loss", "assistant_only_loss",
    "max_seq_length", "dataset_kwargs", "eval_packing", "chat_template_path", "dataset_mixer", "dataset_mixture",
)  # fmt: skip
"""SFTConfig's own keys, and those of alignment-handbook's scripts if nothing else tells."""
DPO: Final = (
    "precompute_ref_log_probs", "precompute_ref_batch_size", "loss_weights", "ld_alpha", "f_divergence_type", "rpo_alpha",
    "use_weighting", "discopop_tau", "reference_free", "max_prompt_length", "ref_model_init_kwargs", "force_use_ref_model",
)  # fmt: skip
"""Keys of DPOConfig, also of older ones, that SFTConfig does not have."""
KTO: Final = ("desirable_weight", "undesirable_weight")
ONLINE: Final = (
    "num_generations", "reward_funcs", "use_vllm", "vllm_mode", "num_iterations", "rloo_k", "reward_model_path", "kl_coef",
    "steps_per_generation", "num_sample_generations", "response_length",
)  # fmt: skip
"""Keys of trainers that generate text as they train (GRPO, RLOO, PPO)."""
REWARD: Final = ("center_rewards_coefficient",)
NO_REFERENCE: Final = ("cpo_alpha", "simpo_gamma")
"""Keys of CPO and ORPO, whose losses have no reference model."""

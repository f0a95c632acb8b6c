"""A family's module tells what it is: the program, and what of memcalc's mechanisms it goes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.plans import Plan
    from memcalc.families.base.program import Program


class Preset(NamedTuple):
    """DeepSpeed knows this of a model type (module_inject/auto_ep_presets)."""

    sigmoid: bool = False
    """Whether scores are sigmoids, not a softmax."""
    normalises: bool | None = None
    """Whether the chosen scores are made to add up to one; None: as the configuration's `norm_topk_prob` says."""
    corrected: bool = False
    """Whether scores are corrected by a buffer before experts are chosen."""
    shared: bool = False
    """Whether experts that all tokens go to stand beside the routed ones."""
    gated: bool = False
    """Whether these have a gate."""
    returns_logits: bool = False
    """Whether the block computes its logits once more and returns them."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """A record of what a family can do. Without a record it can do what every program can."""

    tensor_parallel: Plan | None = None
    """Its plan, as transformers' `model.tp_plan` has it, empty where transformers splits nothing; None: not modelled."""
    tensor_parallel_without: str | None = None
    """The field with which transformers' own step of the plan fails: norms of all heads are not split; DTensors are not clamped
    in place."""
    tensor_parallel_fails: str | None = None
    """What the model does that breaks transformers' own step of the plan."""
    sequence_parallel: bool = False
    """Whether torch's plan with the sequence split between layers runs it as it is. Norms behind attention or MLP would add
    DTensors to plain tensors, embeddings that are scaled within their module are reduced in another way, and activations with
    weights would not be in the plan."""
    context_parallel: bool = False
    """Whether its attention is causal sdpa in a module called self_attn, which accelerate takes the mask away from: so
    torch's ranks can share a sequence."""
    ulysses: bool = False
    """Whether DeepSpeed's ranks can share its sequences. Of the others it fails: their layers hand no positions to the
    attention, their heads of keys are wider than `head_dim`, or their configuration counts no key/value heads. Recurrences and
    convolutions along the sequence would see one rank's tokens."""
    ulysses_wants_head_dim: bool = False
    """Whether its configuration leaves `head_dim` None where nobody has set it. DeepSpeed takes it as it is."""
    stages: bool = False
    """Whether its stages under torch.distributed.pipelining are held against the real ones."""
    halves: bool = True
    """Whether a backward of it can be run in two halves: not with autograd functions in Python, whose nodes keep what they have
    saved longer between the two."""
    zero3_leaf: bool = False
    """Whether its routed block is one of the classes that ZeRO-3 gathers whole if nothing else is said: MixtralSparseMoeBlock,
    Qwen2MoeSparseMoeBlock, Qwen3MoeSparseMoeBlock."""
    uses_weights_within: bool = False
    """Whether its modules use weights of those within them: ZeRO-3's first forward gathers each where it is used, and its
    recomputation, which knows them (register_external_parameter), together."""
    meets_fp32: bool = False
    """Whether hidden states or attention become fp32 by a floating-point buffer (DeepSpeed's engine.py,
    _cast_module_mixed_precision)."""
    attends_in_fp32: bool = False
    """Whether they do within a layer: what goes into one FSDP2's hooks cast (_fsdp_state.py, _pre_forward), but no buffer."""
    auto_ep: Preset | None = None
    """What DeepSpeed's AutoEP knows of it; None where it has no preset."""
    chunked_loss: bool = False
    """Whether its logits are the head's product and nothing else, as torch's linear_cross_entropy needs it."""
    liger: Literal["llama", "gemma2"] | None = None
    """Which of Liger-Kernel's sets of patches transformers' code for it gets (`memcalc.kernels.liger.PATCHES`)."""
    megatron_kernels: bool = False
    """Whether Megatron's kernels are modelled in the place of transformers' functions."""
    megatron_activations: tuple[str, ...] = ("silu", "swish")
    """The activations of its configuration that Megatron's fused kernels compute."""
    activation_field: str = "hidden_act"
    """The field of its configuration that names the activation."""
    architecture: Callable[[Any], Architecture] | None = None
    """What Megatron's GPTModel is built from, given a configuration; None where it is not modelled."""
    only_qkv_biases: bool = False
    """Whether no linear layer but those of q, k and v has the bias that its configuration's `attention_bias` speaks of."""
    megatron_deepspeed: bool = False
    """Whether Megatron-DeepSpeed has its layers: no experts of Megatron-Core, no norms of q and k, all biases or none."""
    auto_class: str | None = None
    """transformers' auto class of a type that is not trained as a language model of one stack."""
    decodes_encoded: bool = False
    """Whether it has an encoder, and a decoder that attends to what that has made."""
    batch: Literal["tokens", "images", "speech"] = "tokens"
    """What it is trained on."""
    layers_keep_states: bool = False
    """Whether its layers keep their states from one forward to the next, as modules' attributes."""


@dataclass(frozen=True)
class Family:
    """A model type of transformers and its program: the constant FAMILY of a module of `memcalc.families`."""

    model_type: str
    program: type[Program]
    support: Support = Support()

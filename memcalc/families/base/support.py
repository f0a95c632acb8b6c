"""The record of a family's module: its program, and the mechanisms of memcalc that support it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.plans import Plan
    from memcalc.families.base.program import Program


class Preset(NamedTuple):
    """DeepSpeed's preset for a model type (module_inject/auto_ep_presets)."""

    sigmoid: bool = False
    """True if scores are sigmoids; False for a softmax."""
    normalises: bool | None = None
    """True if the chosen scores are scaled to add up to one; None: as the configuration's `norm_topk_prob` says."""
    corrected: bool = False
    """True if a buffer corrects scores before experts are chosen."""
    shared: bool = False
    """True if there are also experts that all tokens go to."""
    gated: bool = False
    """True if the shared experts have a gate."""
    returns_logits: bool = False
    """True if the block computes its logits once more and returns them."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """The record of a family's features. A family without a record has those of every program."""

    tensor_parallel: Plan | None = None
    """The plan, as in transformers' `model.tp_plan`; empty if transformers splits nothing; None: not modelled."""
    tensor_parallel_without: str | None = None
    """The field with which transformers' own step of the plan fails: norms of all heads are not split; DTensors are not
    clamped in place."""
    tensor_parallel_fails: str | None = None
    """The property of the model that breaks transformers' own step of the plan."""
    sequence_parallel: bool = False
    """True if torch's plan with the sequence split between layers runs the model as it is. It does not with norms
    behind attention or MLP, which would add DTensors to plain tensors, with embeddings that are scaled within their
    module, which are reduced in another way, and with activations that have weights, which are not in the plan."""
    context_parallel: bool = False
    """True if attention is causal sdpa in a module called self_attn, from which accelerate removes the mask. Then
    torch's ranks can share a sequence."""
    ulysses: bool = False
    """True if DeepSpeed's ranks can share sequences. It fails for layers that hand no positions to the attention, for
    heads of keys wider than `head_dim`, and for configurations without a number of key/value heads. Recurrences and
    convolutions along the sequence would see one rank's tokens."""
    ulysses_wants_head_dim: bool = False
    """True if the configuration leaves `head_dim` None where nobody has set it. DeepSpeed takes it as it is."""
    stages: bool = False
    """True if the stages under torch.distributed.pipelining are tested against the real ones."""
    halves: bool = True
    """True if backward can be run in two halves. It cannot with autograd functions in Python, whose nodes keep their
    saved tensors longer between the halves."""
    zero3_leaf: bool = False
    """True if the routed block is a class that ZeRO-3 gathers whole by default: MixtralSparseMoeBlock,
    Qwen2MoeSparseMoeBlock, Qwen3MoeSparseMoeBlock."""
    uses_weights_within: bool = False
    """True if modules use weights of modules inside them. ZeRO-3's first forward gathers each where it is used. Its
    recomputation knows them (register_external_parameter) and gathers them together."""
    meets_fp32: bool = False
    """True if hidden states or attention become fp32 through a floating-point buffer (DeepSpeed's engine.py,
    _cast_module_mixed_precision)."""
    attends_in_fp32: bool = False
    """True if hidden states or attention become fp32 within a layer. FSDP2's hooks cast the inputs of a layer
    (_fsdp_state.py, _pre_forward), but no buffer."""
    auto_ep: Preset | None = None
    """The preset of DeepSpeed's AutoEP; None if it has none."""
    conv1d: bool = False
    """True if the linear layers are transformers' Conv1D, which is no nn.Linear."""
    chunked_loss: bool = False
    """True if the logits are the head's product and nothing else, as torch's linear_cross_entropy needs it."""
    liger: Literal["llama", "gemma2"] | None = None
    """The set of Liger-Kernel's patches for transformers' code (`memcalc.kernels.liger.PATCHES`)."""
    liger_loss: bool = True
    """False if Liger-Kernel's patch of the loss over logits (`cross_entropy=True`) changes a name that the type's code does
    not use."""
    megatron_kernels: bool = False
    """True if Megatron's kernels are modelled instead of transformers' functions."""
    megatron_activations: tuple[str, ...] = ("silu", "swish")
    """The configuration's activations that Megatron's fused kernels compute."""
    activation_field: str = "hidden_act"
    """The field of the configuration that names the activation."""
    architecture: Callable[[Any], Architecture] | None = None
    """Returns the architecture of Megatron's GPTModel for a configuration; None if it is not modelled."""
    only_qkv_biases: bool = False
    """True if only the linear layers of q, k and v have the bias of the configuration's `attention_bias`."""
    megatron_deepspeed: bool = False
    """True if Megatron-DeepSpeed has the layers: no experts of Megatron-Core, no norms of q and k, all biases or
    none."""
    auto_class: str | None = None
    """transformers' auto class of a type that is not trained as a language model of one stack."""
    decodes_encoded: bool = False
    """True if the model has an encoder, and a decoder that attends to the encoder's output."""
    encoded_stages: bool = False
    """True if the stages of the encoder and of the decoder under torch.distributed.pipelining are tested against real
    ones."""
    batch: Literal["tokens", "images", "speech"] = "tokens"
    """The kind of data that the model is trained on."""
    layers_keep_states: bool = False
    """True if layers keep their states from one forward to the next, as attributes of modules."""
    only_engine: str | None = None
    """The engine whose own model the type is, and the only one that runs it; None for a model of transformers."""


@dataclass(frozen=True)
class Family:
    """A model type of transformers, or of an engine, and its program: the constant FAMILY of a module of
    `memcalc.families`."""

    model_type: str
    program: type[Program]
    support: Support = Support()

"""Gemma (models/gemma/modeling_gemma.py): Llama with scaled embeddings and norms in fp32 around 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, mean, power, rsqrt
from memcalc.core.ops.replaceable import replaceable
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers
from memcalc.families.base.module import Buffer, Module
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """The fields and defaults of models/gemma/configuration_gemma.py. `gelu` stands for its tanh form there, which costs the
    same."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"use_bidirectional_attention": (False, None)}

    vocab_size: Count = 256000
    pad_token_id: int | None = 0
    hidden_size: Count = 3072
    intermediate_size: Count = 24576
    num_hidden_layers: Layers = 28
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 16
    head_dim: Count = 256
    hidden_act: Activation = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False


class Gemma(Llama):
    """The program of GemmaForCausalLM."""

    Config = GemmaConfig

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("model.embed_tokens.embed_scale", ())
        yield from super().buffers()

    def embed(self, m: Module, ids: Tensor) -> Tensor:
        run, scale = m.run, (m / "embed_tokens").buffer("embed_scale")
        if run.tensor_parallel is not None:
            return super().embed(m, ids) * cast(scale, run.dtype)
        return (m / "embed_tokens").scaled_embedding(ids, lambda looked_up: looked_up * cast(scale, run.dtype))

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return gemma_rms_norm(m, hidden_states)


@replaceable
def gemma_rms_norm(m: Module, hidden_states: Tensor) -> Tensor:
    """Return the output of GemmaRMSNorm. The weight is an offset from 1, and the product is in fp32."""
    with m:
        output = scaled_by_rms(cast(hidden_states, fp32))
        output = output * (1.0 + cast(m.weight(), fp32))
        return cast(output, hidden_states.dtype)


def scaled_by_rms(x: Tensor) -> Tensor:
    """Return GemmaRMSNorm._norm."""
    return x * rsqrt(mean(power(x, 2)) + 1e-6)


FAMILY: Final = Family("gemma", Gemma, Support(tensor_parallel=LLAMA, context_parallel=True, ulysses=True, stages=True))

"""Products and tables: nn.Linear, nn.Embedding, and attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memcalc.core.dims import Dim, divided
from memcalc.core.ops.attention import scaled_dot_product_attention
from memcalc.core.ops.shape import chunk, reshape, transpose, view
from memcalc.families.base.config import Count
from memcalc.families.base.layers.layer import Layer, Parameter, dim, number, of_rank, shown

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module

_NO_PLACE: Mapping[str, Sequence[Any]] = {"device": (None,), "dtype": (None,)}


@dataclass(frozen=True, kw_only=True)
class Linear(Layer):
    """nn.Linear over the last dim."""

    kind: ClassVar[str] = "linear"
    torch: ClassVar[str] = "Linear"
    main: ClassVar[str] = "out"
    positions: ClassVar[Sequence[str]] = ("in_", "out", "bias")
    aliases: ClassVar[Mapping[str, str]] = {"in": "in_", "in_features": "in_", "out_features": "out", "units": "out"}
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = _NO_PLACE
    component: ClassVar[str] = "linear"
    saves_input: ClassVar[bool] = True

    in_: Count | None = None
    out: Count
    bias: bool = True

    def shape(self, x: Shape) -> Shape:
        if self.in_ not in (None, x[-1].size):
            raise ValueError(f"in {self.in_}: the input has {x[-1].size} features ({shown(x)}); is a flatten missing?")
        if x[-1].name == "seq":
            raise ValueError("takes the last dim, which is --seq-len; allowed: a number in `input`")
        return (*x[:-1], dim("features", self.out))

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        out = dim("out", self.out)
        yield Parameter("weight", (out, x[-1]))
        if self.bias:
            yield Parameter("bias", (out,))

    def counted(self, x: Shape) -> str:
        each = f"({x[-1].size} + 1)" if self.bias else str(x[-1].size)
        return number(f"{each} · {self.out}", [p.shape for p in self.parameters(x)])

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return m.linear(x)


@dataclass(frozen=True, kw_only=True)
class Embedding(Layer):
    """nn.Embedding of ids."""

    kind: ClassVar[str] = "embedding"
    torch: ClassVar[str] = "Embedding"
    main: ClassVar[str] = "size"
    positions: ClassVar[Sequence[str]] = (
        "vocab",
        "size",
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
    )
    aliases: ClassVar[Mapping[str, str]] = {
        "num_embeddings": "vocab", "rows": "vocab", "embedding_dim": "size", "dim": "size",
    }  # fmt: skip
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "max_norm": (None,), "norm_type": (2, 2.0), "scale_grad_by_freq": (False,), "sparse": (False,), **_NO_PLACE,
    }  # fmt: skip
    component: ClassVar[str] = "embedding"
    integers: ClassVar[bool] = True

    vocab: Count
    size: Count
    padding_idx: int | None = None

    def check(self) -> None:
        if self.padding_idx is not None and not -self.vocab <= self.padding_idx < self.vocab:
            raise ValueError(f"padding_idx {self.padding_idx}: is not one of the {self.vocab} rows")

    def shape(self, x: Shape) -> Shape:
        return (*x, dim("features", self.size))

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        yield Parameter("weight", (dim("rows", self.vocab), dim("features", self.size)))

    def counted(self, x: Shape) -> str:
        return number(f"{self.vocab} · {self.size}", [p.shape for p in self.parameters(x)])

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return m.embedding(x)


@dataclass(frozen=True, kw_only=True)
class Attention(Layer):
    """Self-attention as it is written by hand: one product for queries, keys and values, torch's
    scaled_dot_product_attention, and one product for the output."""

    kind: ClassVar[str] = "attention"
    torch: ClassVar[str] = "Attention"
    main: ClassVar[str] = "heads"
    aliases: ClassVar[Mapping[str, str]] = {"num_heads": "heads"}
    component: ClassVar[str] = "attention"
    saves_input: ClassVar[bool] = True

    heads: Count
    causal: bool = False
    bias: bool = True

    def shape(self, x: Shape) -> Shape:
        of_rank(x, 2, what="tokens × features")
        if x[1].size % self.heads:
            raise ValueError(f"heads {self.heads}: the input's {x[1].size} features are not divisible by it")
        return x

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        for name, out in (("qkv", dim("3·features", 3 * x[1].size)), ("out", x[1])):
            yield Parameter(f"{name}.weight", (out, x[1]))
            if self.bias:
                yield Parameter(f"{name}.bias", (out,))

    def counted(self, x: Shape) -> str:
        each = f"({x[1].size} + 1)" if self.bias else str(x[1].size)
        return number(f"{each} · 3·{x[1].size} + {each} · {x[1].size}", [p.shape for p in self.parameters(x)])

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        batch, tokens, features = x.shape
        heads, width = Dim("heads", self.heads), divided(features, self.heads)
        q, k, v = chunk((m / "qkv").linear(x), 3)
        q, k, v = (transpose(view(t, batch, tokens, heads, width), 1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, None, self.causal)
        return (m / "out").linear(reshape(transpose(y, 1, 2), batch, tokens, features))

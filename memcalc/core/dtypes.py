"""Element types: a name and a size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type. Instances are compared by identity: each type has exactly one."""

    name: str
    itemsize: int
    is_floating_point: bool = True

    def __str__(self) -> str:
        return self.name


fp64 = DType("fp64", 8)
fp32 = DType("fp32", 4)
bf16 = DType("bf16", 2)
fp16 = DType("fp16", 2)
complex64 = DType("complex64", 8, is_floating_point=False)
int64 = DType("int64", 8, is_floating_point=False)
int32 = DType("int32", 4, is_floating_point=False)
uint8 = DType("uint8", 1, is_floating_point=False)
int8 = DType("int8", 1, is_floating_point=False)
boolean = DType("bool", 1, is_floating_point=False)

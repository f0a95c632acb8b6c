"""ZeRO++ in DeepSpeed's ZeRO-3: weights are gathered as int8 codes (qwZ) or from a second partition (hpZ), and gradients
are reduced as int4 codes (qgZ).

Sources, in deepspeed/runtime: zero/partition_parameters.py (_partition_param_sec, _all_gather_sequential,
_all_gather_coalesced and the handles), zero/partitioned_param_coordinator.py (__all_gather_params_), zero/stage3.py
(__avg_scatter_grads, partition_grads, invalidate_secondary_tensor), comm/coalesced_collectives.py
(all_to_all_quant_reduce). What the quantiser allocates is C++ (csrc/quantization/pt_binding.cpp). The method: Wang et al.
2023, arXiv 2306.10209.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp16, fp32, int8
from memcalc.core.noted import Begins
from memcalc.core.tensor import Sent
from memcalc.engines.deepspeed.quantizer import scales_of
from memcalc.engines.deepspeed.zero3_coordinator import Handle
from memcalc.engines.deepspeed.zero3_step import Step, ZeRO3, play

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.core.noted import Noted, Over
    from memcalc.engines.deepspeed.zero3_coordinator import Gathered, Order
    from memcalc.layout.collectives import Kind
    from memcalc.tape.rewritten import Out

SECONDARY: Final = "within the group of a second partition"
INSIDE: Final = "inside a node"
BETWEEN: Final = "between nodes"
"""Groups of ranks, as a run records them in the place of an axis."""
SECOND_PARTITION: Final = "second partition of the weights (hpZ)"
CODES, SCALES = "codes", "scales"
_HALF: Final = 2
"""The 4-bit codes of a byte."""


class Nodes(NamedTuple):
    """The nodes of the two hops of qgZ."""

    number: int
    ranks: int
    """The ranks in each."""


class PlusPlus(NamedTuple):
    """ZeRO-3 with parts of ZeRO++ while a micro-batch runs."""

    plain: ZeRO3
    quantized_weights: bool
    second_ranks: int
    """The ranks that share a second partition; 1: there is none."""
    nodes: Nodes | None
    """The nodes over which gradients are reduced as codes; None: they are reduce-scattered."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of every parameter, in definition order; empty if `nodes` is None."""
    is_later: bool = False
    """True if an earlier micro-batch of the step has left its gradients and second partitions."""

    def play(self, noted: Noted, out: Out) -> None:
        """Gather and reduce. The order of modules is known from a previous step."""
        order = [event.visited for event in noted.events if isinstance(event, Begins)]
        play(PlusPlusStep(self, noted, order, out))


class QuantizedHandle(Handle):
    """All-gathers of codes under way."""

    __slots__ = ("alone",)

    def __init__(self) -> None:
        super().__init__()
        self.alone: int | None = None
        """The parameter, if there is one only."""


class PlusPlusStep(Step):
    """One forward and backward."""

    def __init__(self, how: PlusPlus, noted: Noted, order: Order, out: Out) -> None:
        super().__init__(how.plain, noted, order, out)
        self.plus = how
        self.second: dict[int, object] = {}
        """The second partitions. Those of frozen parameters never go, and are rows of their own."""
        if how.quantized_weights:
            self._check_modules(order)
        if how.second_ranks > 1 and how.is_later:
            for i in range(len(self.sizes)):
                if i not in self.coordinator.persistent:
                    self._keep_second(i)

    # --- parameters

    def _check_modules(self, order: Order) -> None:
        """Raise InputError if a module's weights, which the first steps of a process gather by themselves, cannot be codes."""
        for visited in order:
            if visited.parameters:
                scales_of(sum(self._padded(i) for i in visited.parameters) // self.how.ranks)

    def _has_second(self, i: int) -> bool:
        return i in self.second or (self.plus.second_ranks > 1 and i in self.how.frozen)

    def _keep_second(self, i: int) -> None:
        """Cut a parameter's second partition out of the whole one, when that is released for the first time in a step."""
        if self.plus.second_ranks > 1 and not self._has_second(i):
            self.second[i] = self._block(SECOND_PARTITION, self._padded(i) // self.plus.second_ranks)

    def _free(self, i: int) -> None:
        self._keep_second(i)
        super()._free(i)

    def _launch(self, gathered: Gathered) -> dict[int, Handle | None]:
        """Begin an all-gather of the parameters that have a second partition, within its ranks, and one of the others."""
        inside = tuple(i for i in gathered.parameters if self._has_second(i))
        handles: dict[int, Handle | None] = {}
        for own in (inside, tuple(i for i in gathered.parameters if i not in inside)):
            if own and self.plus.quantized_weights:
                handles |= dict.fromkeys(own, self._gather_codes(own))
            elif own:
                handle = Handle()
                self._gather(own, handle)
                handles |= dict.fromkeys(own, handle if handle.buffers else None)
        return handles

    def _gather_axis(self, parameter: int) -> tuple[str, int]:
        """Return the group of ranks that a parameter is gathered among, and their number."""
        return (SECONDARY, self.plus.second_ranks) if self._has_second(parameter) else ("dp", self.how.ranks)

    def _gather_codes(self, parameters: tuple[int, ...]) -> QuantizedHandle:
        handle = QuantizedHandle()
        axis, ranks = self._gather_axis(parameters[0])
        elements = sum(self._padded(i) for i in parameters)
        codes = self._of("int8 codes of gathered parameters", elements, int8)
        part = elements // ranks
        joined = self._block("parts of parameters, joined", part) if len(parameters) > 1 else None
        half = self._of("parts of parameters in fp16", part, fp16) if self.how.dtype is not fp16 else joined
        joined = None
        _own_codes = self._of("codes of the rank's parts", part, int8)
        _own_scales = self._of("scales of the rank's parts", scales_of(part), fp32)
        del half
        scales = self._of("scales of gathered parameters", scales_of(part) * ranks, fp32)
        self._send_over(axis, "all_gather", CODES, self._phase(), elements, int8)
        self._send_over(axis, "all_gather", SCALES, self._phase(), scales_of(part) * ranks, fp32)
        handle.buffers = [codes, scales]
        if len(parameters) == 1:
            handle.alone = parameters[0]
        else:
            handle.parameters += parameters
        return handle

    def _arrive(self, handle: Handle | None) -> None:
        """Wait for an all-gather; the codes of all its parameters are made fp16 numbers at once."""
        if not isinstance(handle, QuantizedHandle) or handle.arrived:
            super()._arrive(handle)
            return
        handle.arrived = True
        if handle.alone is not None:
            self.whole[handle.alone] = self._in_own_dtype(handle.alone)
            return
        elements = sum(self._padded(i) for i in handle.parameters)
        handle.buffers.append(self._of("gathered parameters in fp16, of several", elements, fp16))
        for i in handle.parameters:
            self.whole[i] = self._in_own_dtype(i)

    def _in_own_dtype(self, i: int) -> object:
        """Return a gathered parameter; the quantiser's are fp16 before they are cast."""
        if self.how.dtype is fp16:
            return self._block("gathered parameters", self.sizes[i])
        _half = self._of("a gathered parameter in fp16", self.sizes[i], fp16)
        return self._block("gathered parameters", self.sizes[i])

    def _send(self, kind: Kind, phase: str, parameter: int, elements: int) -> None:
        if kind == "all_gather":
            self._send_over(self._gather_axis(parameter)[0], kind, "", phase, elements, self.how.dtype)
        else:
            super()._send(kind, phase, parameter, elements)

    def _send_over(self, axis: str, kind: Kind, name: str, phase: str, elements: int, dtype: DType) -> None:
        self.out.send(Sent(axis, kind, name, phase, None, (Dim("elements", elements),), dtype), self.sent)

    def _of(self, name: str, elements: int, dtype: DType) -> object:
        return self.out.block(name, "elements", elements, dtype)

    # --- gradients

    def backward_is_over(self, event: Over) -> None:
        super().backward_is_over(event)
        self.second.clear()  # the step has them as a row

    def _flush(self) -> None:
        """Reduce the bucket (__avg_scatter_grads), then leave the rank's parts."""
        if self.plus.nodes is None:
            super()._flush()
            return
        self.bucket.sort(key=lambda one: one[0])
        parts = self._reduced(self.plus.nodes)
        if self.plus.is_later and self.how.dtype is not fp16:
            for i, _ in self.bucket:
                if self._is_quantized(i):  # what comes out of the codes is fp16
                    _cast = self._block("a reduced part in the gradients' dtype", self.sizes[i] // self.how.ranks)
                    del _cast
        del parts
        self.bucket.clear()
        self.in_bucket = 0

    def _reduced(self, nodes: Nodes) -> list[object]:
        """Return what each gradient's part refers to. The variables are those of all_to_all_quant_reduce: they keep the blocks
        of one gradient until the next one's are there."""
        out: list[object] = [None] * len(self.bucket)
        for k, (i, gradient) in enumerate(self.bucket):
            if not self._is_quantized(i):
                out[k] = self._reduced_whole(i, gradient)
                continue
            size, groups = self.sizes[i], self._groups(i)
            _codes, _scales = self._codes(size // _HALF, groups)
            _local_output = self._of("codes of the first hop, received", size // _HALF, int8)
            _local_scales = self._of("scales of the first hop, received", groups, fp32)
            self._send_codes(INSIDE, size // _HALF, groups)
            own = size // nodes.ranks
            _summed, _summed_scales = self._codes(own // _HALF, groups // nodes.ranks)
            _global_output = self._of("codes of the second hop, received", own // _HALF, int8)
            _global_scales = self._of("scales of the second hop, received", groups // nodes.ranks, fp32)
            self._send_codes(BETWEEN, own // _HALF, groups // nodes.ranks)
            _final = self._of("gradients of the second hop in fp16", own, fp16)
            total = None
            for _ in range(nodes.number):
                total = self._of("sum over nodes", own // nodes.number, fp16)
            out[k] = self._of("reduced part of a gradient", own // nodes.number, fp16)
            del total
        return out

    def _codes(self, nbytes: int, groups: int) -> tuple[object, object]:
        """Return a quantised gradient: the kernel makes the scales first."""
        scales = self._of("scales of a gradient", groups, fp32)
        return self._of("int4 codes of a gradient", nbytes, int8), scales

    def _send_codes(self, axis: str, codes: int, groups: int) -> None:
        self._send_over(axis, "all_to_all", CODES, "backward", codes, int8)
        self._send_over(axis, "all_to_all", SCALES, "backward", groups, fp32)

    def _reduced_whole(self, i: int, gradient: object) -> object:
        """Reduce-scatter a gradient of one dimension, or one that no 4-bit codes of all ranks divide; return what is sent."""
        elements = self._padded(i)
        super()._send("reduce_scatter", "backward", i, elements)
        padding = elements - self.sizes[i]
        if not padding:
            return gradient
        _pads = self._of_sent("padding of the bucket", padding)
        return self._of_sent("copy of a gradient that is reduced", elements)

    def _is_quantized(self, i: int) -> bool:
        return len(self.plus.shapes[i]) != 1 and not self.sizes[i] % (_HALF * self.how.ranks)

    def _groups(self, i: int) -> int:
        """Return the scales of a gradient. Where ranks do not divide them, NCCL's equal split leaves the rest unsent."""
        return max(*self.plus.shapes[i][:2], self.how.ranks)

"""The kernels of every optimizer's step, from which its time is read, against those of the real step."""

from __future__ import annotations

import pytest
from optimizers.kernels_oracle import Kernels, kernels_of_step
from optimizers.test_optimizers import ALL, LAYOUTS

from memcalc.core.dims import numel
from memcalc.core.dtypes import DType, bf16, fp32
from memcalc.timing.optimizer import kernels_of

KINDS = ("decoder", "one stack", "vectors", "four dims")


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize(("name", "implementation"), ALL)
def test_bytes_and_products_are_the_real_ones(name: str, implementation: str, dtype: DType, layout: str) -> None:
    parameters = LAYOUTS[layout]
    paper = kernels_of(name, implementation, parameters, dtype)
    flops = sum(2 * numel(work.factors)[0] * calls for work, calls in paper.products)
    products = sum(calls for _, calls in paper.products)
    assert Kernels(paper.nbytes, paper.calls, flops, products) == kernels_of_step(
        name, implementation, parameters, dtype
    )

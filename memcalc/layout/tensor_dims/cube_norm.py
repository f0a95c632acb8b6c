"""LayerNorm3D: sums over the ranks that have the other parts of the hidden states (norm_forward and norm_backward in
colossalai/legacy/nn/layer/parallel_3d/_operation.py, op by op: torch.jit fuses none of them without its fusers)."""

from __future__ import annotations

from typing import Final

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.layout.tensor_dims.sending import per_token, send

_TWO: Final = Dim("2", 2)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, name: str) -> Tensor:
    """Run _Layernorm3D. It saves x less the mean, the deviation and the weight."""
    sum_ = per_token(x, "sum")
    squares = like(x, "squares")
    sqr_sum = per_token(x, "sum of squares")
    del squares
    mean = _summed_over_ranks(sum_, sqr_sum, f"{name}: sum and sum of squares")
    mu = like(x, "less the mean")
    square = per_token(x, "squared mean")
    var = per_token(x, "variance")
    del square
    shifted = per_token(x, "variance + epsilon")
    sigma = per_token(x, "deviation")
    del shifted
    z = like(mu, "normalised")
    scaled = like(z, "scaled")
    del z
    output = like(scaled, "layer norm")
    del scaled, var, mean, sum_, sqr_sum
    if recording(x, weight, bias):
        output.node = Node(x.memory, _layer_norm_backward, (x, weight, bias), (mu, sigma, weight), name)
    return output


def _summed_over_ranks(first: Tensor, second: Tensor, name: str) -> Tensor:
    """Stack two numbers of each token and add them up over the ranks; the result of the division by the width."""
    both = new_tensor(first.memory, (_TWO, *first.shape), first.dtype, "two numbers of each token")
    send(first.memory, "output", "all_reduce", name, both.shape, both.dtype)
    return like(both, "means")


def _layer_norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    mu, _sigma, weight = node.unpack()
    memory, grad, name = node.memory, grads[0], node.context
    product = like(grad, "gradient times centred")
    weight_grad = like(product, "gradient of the weight")
    del product
    vector, dtype = weight.shape, grad.dtype
    for which in ("bias", "weight"):
        send(memory, "plane", "all_reduce", f"gradient of {name}.{which}", vector, dtype)
    _bias_sum = new_tensor(memory, vector, dtype, "gradient of the bias, summed")
    bias_zeros = new_tensor(memory, vector, dtype, "zeros of the gradient")
    _weight_sum = new_tensor(memory, vector, dtype, "gradient of the weight, summed")
    del weight_grad
    weight_zeros = new_tensor(memory, vector, dtype, "zeros of the gradient")
    dmu, both = _norm_backward(grad, mu, name)
    doubled = per_token(mu, "twice the gradient of the variance")
    product = like(mu, "times centred")
    del doubled
    added = like(mu, "with the gradient of the mean")
    del product
    divided = like(mu, "over the width")
    del added
    input_grad = like(mu, "input gradient")
    del divided, dmu, both
    return [input_grad, weight_zeros, bias_zeros]


def _norm_backward(grad: Tensor, mu: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Run norm_backward, and add its two numbers of each token up over the ranks."""
    dz = like(grad, "gradient of the normalised")
    dmu = like(dz, "gradient of the centred")
    product = like(dz, "times centred")
    halved = like(product, "times -1/2")
    del product
    powered = per_token(mu, "deviation to the -3")
    dvar = like(halved, "gradient of the variance")
    del halved, powered, dz
    dmean = like(dmu, "gradient of the mean")
    dvar_sum = per_token(mu, "gradient of the variance")
    del dvar
    _dmean_sum = per_token(mu, "gradient of the mean")
    del dmean
    both = new_tensor(mu.memory, (_TWO, *dvar_sum.shape), mu.dtype, "two numbers of each token")
    send(mu.memory, "output", "all_reduce", f"{name}: gradients of mean and variance", both.shape, both.dtype)
    return dmu, both

"""Multi-token prediction (megatron/core/transformer/multi_token_prediction.py) on the last pipeline stage.

A layer of it joins the hidden states with the embeddings of the tokens one place further, projects both to one width
and runs a transformer layer of the last one's kind. The output layer is the model's own, so each of these layers has
logits and a loss of its own (`--mtp-num-layers`; DeepSeek-AI 2024, arXiv 2412.19437, section 2.2). The last stage has a
copy of the embedding. Its gradient and the first stage's are summed (core/distributed/finalize_model_grads.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.checkpoint import checkpoint
from memcalc.core.dims import Dim, Shape, merge
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.elementwise import like, recording, scale
from memcalc.core.ops.shape import cat
from memcalc.core.tensor import Tensor, contiguous_strides, new_tensor
from memcalc.families.base.module import Module, Weight
from memcalc.megatron.losses import losses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.families.base.module import Run
    from memcalc.megatron.gpt_model import GPTModel
    from memcalc.megatron.layers import TensorParallel

PATH = "mtp.layers"


def weights(model: GPTModel) -> Iterator[Weight]:
    """Yield the weights of MultiTokenPredictionBlock in the order of its parameters. They belong to no layer of the
    decoder."""
    both, part = Dim("2·hidden", 2 * model.hidden.size), model.predicted_part
    for i in range(model.a.mtp):
        path = f"{PATH}.{i}"
        yield from model.norm_weights(f"{path}.enorm", model.hidden)
        yield from model.norm_weights(f"{path}.hnorm", model.hidden)
        yield Weight(f"{path}.eh_proj.weight", (part, both), "mlp")
        for weight in model.weights_of_layer(routed=model.a.predicts_by_experts):
            yield weight._replace(name=f"{path}.transformer_layer.{weight.name}")
        yield from model.norm_weights(f"{path}.final_layernorm", model.hidden)


def predicted(
    model: GPTModel,
    run: Run,
    tp: TensorParallel,
    ids: Tensor,
    hidden_states: Tensor,
    angles: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Run MultiTokenPredictionBlock. Returns the hidden states of the decoder and of each layer, joined along the
    sequence."""
    hidden_states_list = [hidden_states]
    input_ids = position_ids = ids
    for i in range(model.a.mtp):
        m = Module(run, f"{PATH}.{i}")
        input_ids, position_ids = _rolled(input_ids, "tokens"), _rolled(position_ids, "positions")
        decoder_input = model.embed(Module(run, "embedding"), tp, input_ids, position_ids)
        rest = m, tp, hidden_states, decoder_input, angles, mask
        if run.recompute and model.layout.recompute_layers is None:
            hidden_states = checkpoint(run.memory, _projected, model, *rest, early_stop=False)
        else:
            hidden_states = _projected(model, *rest)
        del rest, decoder_input
        hidden_states_list.append(hidden_states)
    return _joined(hidden_states_list)


def _rolled(tokens: Tensor, name: str) -> Tensor:
    """Run roll_tensor: one place further."""
    return like(tokens, f"rolled {name}", int64)


def _projected(
    model: GPTModel,
    m: Module,
    tp: TensorParallel,
    hidden_states: Tensor,
    decoder_input: Tensor,
    angles: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Run _proj_and_transformer_layer."""
    m.memory.scope = m.path
    decoder_input = model.norm(m / "enorm", decoder_input)
    hidden_states = model.norm(m / "hnorm", hidden_states)
    hidden_states = cat((decoder_input, hidden_states), Dim("2·hidden", 2 * model.hidden.size))
    proj = m / "eh_proj"
    hidden_states = model.column(proj, tp, hidden_states)
    hidden_states = _whole(tp, hidden_states, model.hidden)
    hidden_states = model.layer(m / "transformer_layer", _shard(tp, hidden_states), tp, angles, mask)
    return model.norm(m / "final_layernorm", hidden_states)


def _whole(tp: TensorParallel, x: Tensor, width: Dim) -> Tensor:
    """Run gather_from_tensor_model_parallel_region: gather along the first dim, then put the parts side by side."""
    if tp.ranks == 1:
        return x
    shape = (*x.shape[:-1], width)
    tp.send(x.memory, "all_gather", "output of eh_proj", shape, x.dtype)
    gathered = new_tensor(x.memory, shape, x.dtype, "gathered output of eh_proj")
    out = new_tensor(x.memory, shape, x.dtype, "output of eh_proj")
    del gathered
    if recording(x):
        out.node = Node(x.memory, _whole_backward, (x,))
    return out


@no_kernel
def _whole_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    shape, dtype = node.metadata[0]
    return [new_tensor(node.memory, shape, dtype, "part of the gradient")]


def _shard(tp: TensorParallel, x: Tensor) -> Tensor:
    """Run scatter_to_sequence_parallel_region: a view, so the whole tensor stays as long as the shard."""
    if not tp.sequence_parallel:
        return x
    shape: Shape = (x.shape[0], tp.shard, x.shape[2])
    node = Node(x.memory, _shard_backward, (x,), (), tp) if recording(x) else None
    return Tensor(x.storage, shape, contiguous_strides(shape), x.dtype, node)


@no_kernel
def _shard_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    tp: TensorParallel = node.context
    shape, dtype = node.metadata[0]
    tp.send(node.memory, "all_gather", "output gradient of eh_proj", shape, dtype)
    return [new_tensor(node.memory, shape, dtype, "gathered gradient")]


# --- the losses


def with_losses(model: GPTModel, run: Run, tp: TensorParallel, hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of each layer of `predicted`. Returns the decoder's hidden states, whose backward begins those of
    the losses (_postprocess of core/models/gpt/gpt_model.py)."""
    mtp_labels = like(labels, "labels of the layer", int64)
    hidden_states, *hidden_states_list = _apart(hidden_states)
    for layer_states in hidden_states_list:
        mtp_logits = model.output(run, tp, layer_states)
        mtp_labels = _rolled(mtp_labels, "labels")
        loss_mask = new_tensor(run.memory, (merge(*labels.shape),), fp32, "rolled loss mask")
        mtp_loss = loss_mask * losses(model.layout.loss, run, tp, mtp_logits, mtp_labels)
        hidden_states = _with_loss(hidden_states, scale(scale(mtp_loss, "mul"), "div"))
    return hidden_states


def _joined(parts: list[Tensor]) -> Tensor:
    """Compute `torch.cat(parts, 0)` of sequences: one after the other in memory."""
    first = parts[0]
    out = new_tensor(
        first.memory, (Dim(str(len(parts)), len(parts)), *first.shape), first.dtype, "hidden states of all"
    )
    if recording(*parts):
        out.node = Node(first.memory, _joined_backward, parts)
    return out


@no_kernel
def _joined_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [Tensor(grads[0].storage, shape, contiguous_strides(shape), dtype) for shape, dtype in node.metadata]


def _apart(joined: Tensor) -> list[Tensor]:
    """Run `torch.chunk`: views. Backward joins their gradients in one new tensor."""
    count, *shape = joined.shape
    node = Node(joined.memory, _apart_backward, (joined,), outputs=count.size) if recording(joined) else None
    strides = contiguous_strides(tuple(shape))
    return [Tensor(joined.storage, tuple(shape), strides, joined.dtype, node, i) for i in range(count.size)]


def _apart_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    shape, dtype = node.metadata[0]
    return [new_tensor(node.memory, shape, dtype, "gradient of the hidden states of all")]


def _with_loss(hidden_states: Tensor, loss: Tensor) -> Tensor:
    """Run MTPLossAutoScaler: the hidden states as they are. It saves the loss, whose gradient is a constant."""
    x = hidden_states
    node = Node(x.memory, _with_loss_backward, (x, loss), (loss,)) if recording(x, loss) else None
    return Tensor(x.storage, x.shape, x.strides, x.dtype, node)


def _with_loss_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (loss,) = node.unpack()
    ones = like(loss, "ones")
    return [grads[0], like(ones, "gradient of the loss")]

"""The part of a Megatron stage's weights that trains: what DistributedDataParallel and the optimizers have.

Both leave out weights that want no gradient (core/distributed/distributed_data_parallel.py, core/optimizer/__init__.py). With
the distributed optimizer these stay where they were made, outside of the flat buffers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from memcalc.core.dtypes import fp8
from memcalc.core.rows import Row
from memcalc.families.base.module import Weight
from memcalc.megatron.gpt_model import GPTModel

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.engines.megatron.engine import Stage
    from memcalc.families.base.architecture import Architecture
    from memcalc.inputs.model import Model
    from memcalc.megatron.layout import Layout
    from memcalc.megatron.trained import Trained
    from memcalc.setup.setup import Setup

_LAYERS: Final = "megatron/core/tensor_parallel/layers.py"
_COLUMN_PARALLEL: Final = (
    "linear_qkv.weight", "mlp.linear_fc1.weight", "shared_experts.linear_fc1.weight", "linear_q_proj.weight",
    "linear_q_up_proj.weight", "linear_kv_up_proj.weight",
)  # fmt: skip
SOURCES: Final = {"adapters": "Megatron-Bridge megatron/bridge/peft/utils.py, ParallelLinearAdapter"}
"""The sources of weights that Megatron-Core does not have, by their component."""


def trained_of(model: Model) -> Trained | None:
    """Return the part of a model's GPTModel that trains; None: all of it."""
    return getattr(model.program, "trained", None)


def gpt_model(a: Architecture, layout: Layout) -> GPTModel:
    """Return the modules of a chunk."""
    if layout.fp8 is not None:
        from memcalc.megatron.fp8_model import Fp8GPTModel

        return Fp8GPTModel(a, layout)
    if layout.trained is None:
        return GPTModel(a, layout)
    from memcalc.megatron.trained_model import TrainedGPTModel  # most runs train the whole model

    return TrainedGPTModel(a, layout)


def trained_weights_of(stage: Stage) -> Counter[Weight]:
    """Count the weight classes of a stage that train. DistributedDataParallel and the optimizers leave the others out."""
    out: Counter[Weight] = Counter()
    for chunk in stage.chunks:
        all_train = chunk.layout.trained is None
        trained = (w._replace(layer=None) for w in chunk.weights() if chunk.wants_gradient(w))
        out.update(chunk.weight_classes if all_train else Counter(trained))
    return out


def parameter_rows(setup: Setup, stage: Stage) -> tuple[list[Row], list[Row]]:
    """Return the rows of a stage's weights: of those that train, and of the frozen ones."""
    trained, frozen = trained_weights_of(stage), Counter[Weight]()
    for chunk in stage.chunks:
        frozen.update(chunk.weight_classes)
    frozen.subtract(trained)

    def dtype(weight: Weight) -> DType:
        if not setup.fp8_param_gather:
            return setup.compute_dtype
        from memcalc.megatron.fp8_model import in_fp8

        return fp8 if in_fp8(weight) else setup.compute_dtype

    def rows(classes: Counter[Weight]) -> list[Row]:
        return [
            Row("parameters", w.name, w.shape, dtype(w), n, "always", "exact", SOURCES.get(w.component, _LAYERS))
            for w, n in classes.items()
            if n
        ]

    return rows(trained), rows(frozen)


def trains_head(stage: Stage) -> bool:
    """Tell whether the stage has the weight that computes the logits, and trains it."""
    last = stage.chunks[-1]
    if not last.layout.last:
        return False
    head = "embedding.word_embeddings.weight" if last.a.tied else "output_layer.weight"
    return any(weight.name == head for weight in trained_weights_of(stage._replace(chunks=(last,))))


def gathers_again(stage: Stage) -> bool:
    """Tell whether a column-parallel layer of the stage trains, whose backward gathers its input again. Frozen ones gather into
    tensors of their own."""
    if stage.chunks[0].layout.trained is None:
        return True
    return trains_head(stage) or any(w.name.endswith(_COLUMN_PARALLEL) for w in trained_weights_of(stage))

"""ERNIE (models/ernie/modeling_ernie.py, ErnieForCausalLM): BERT, with an embedding of the task if asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import add_
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.config import Count
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.support import Family, Support
from memcalc.families.bert import Bert, BertConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class ErnieConfig(BertConfig):
    """The fields and defaults of models/ernie/configuration_ernie.py."""

    task_type_vocab_size: Count = 3
    use_task_id: bool = False


class Ernie(Bert):
    """The program of ErnieForCausalLM and ErnieForMaskedLM."""

    Config = ErnieConfig
    prefix = "Ernie"
    base = "ernie"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tasks = Dim("task types", config.task_type_vocab_size)

    def embedding_weights(self) -> Iterator[Weight]:
        yield from super().embedding_weights()
        if self.config.use_task_id:
            yield Weight("embeddings.task_type_embeddings.weight", (self.tasks, self.embed), "embedding")

    def positioned(self, m: Module, embeddings: Tensor) -> Tensor:
        if not self.config.use_task_id:
            return embeddings
        task_type_ids = new_tensor(m.run.memory, (m.run.batch, m.run.seq), int64, "task type ids")
        return add_(embeddings, (m / "task_type_embeddings").embedding(task_type_ids))


FAMILY: Final = Family("ernie", Ernie, Support(tensor_parallel={}))

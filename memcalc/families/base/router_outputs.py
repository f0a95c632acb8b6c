"""Router logits that a caller asks for (`output_router_logits`), and the loss that balances experts by them.

transformers' hooks collect what each router returns (utils/output_capturing.py), but not in a recomputation. Mixtral
and its kin add `load_balancing_loss_func` of the logits to their loss (models/mixtral/modeling_mixtral.py). Other types
hold the logits until their forward is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import add_, cast, over, scale, softmax
from memcalc.core.ops.routing import sum_all, sum_first, topk
from memcalc.core.ops.shape import repeat_interleave, reshape, unsqueeze
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import lm_head_loss
from memcalc.families.base.config import FamilyConfig
from memcalc.families.base.module import Module
from memcalc.families.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memcalc.families.base.module import Run


_PER_TOKEN: Final = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k")
_EXPERTS: Final = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
"""The names that configurations have for the experts of a token, and for all experts of a layer."""


@dataclass(frozen=True, kw_only=True)
class RouterOutputsConfig(FamilyConfig):
    """The configuration of a family with routers."""

    given: ClassVar[Sequence[str]] = ("output_router_logits",)

    output_router_logits: bool | None = False


class RouterOutputs(Llama):
    """A model with routers."""

    backbone: ClassVar[str] = "model"
    """The model without its head."""
    balances: ClassVar[bool] = False
    """True if the loss includes the routers' balance."""

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Run MixtralForCausalLM.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        run.router_logits = [] if self.config.output_router_logits else None
        hidden_states = self.model(root / self.backbone, ids)
        router_logits, run.router_logits = run.router_logits, None
        run.memory.enter(run.memory.phase, None)
        kept: list[Tensor] = []  # this frame's `logits`, if there are any

        def logits(hidden_states: Tensor) -> Tensor:
            kept.append(self.head(root, hidden_states))
            return kept[0]

        loss = self.loss_of_tokens(root, logits, hidden_states, ids)
        if router_logits is None or not self.balances:
            return loss
        aux_loss = load_balancing_loss(run, router_logits, Dim("experts_per_token", self.chosen_experts))
        return add_(loss, scale(aux_loss, "mul", "auxiliary loss"))

    def loss_of_tokens(
        self, root: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, ids: Tensor
    ) -> Tensor:
        """Return the loss without the routers'."""
        return lm_head_loss(root / self.head_name, logits, hidden_states, ids)

    @property
    def chosen_experts(self) -> int:
        """Return the number of a token's best experts that the auxiliary loss counts."""
        return self.routed[0]

    chooses_again: bool = False
    """True if a token can be sent to the same expert more than once, where there are fewer than it chooses."""

    def check_step(self) -> None:
        super().check_step()
        asked = self.balances and self.config.output_router_logits
        routes = any(weight.component == "router" for weight in self.weights())
        sent_to = 0 if self.chooses_again else self.routed[0]
        chosen = max(sent_to, self.chosen_experts if asked else 0)
        if routes and chosen > self.routed[1]:
            per_token, experts = (next(n for n in names if hasattr(self.config, n)) for names in (_PER_TOKEN, _EXPERTS))
            raise ValueError(f"{per_token} {chosen} is above {experts} {self.routed[1]}")
        if asked and not routes:
            raise ValueError(
                "output_router_logits true fails in transformers where no layer has a router; allowed: false"
            )


def load_balancing_loss(run: Run, gate_logits: list[tuple[int | None, Tensor]], top_k: Dim) -> Tensor:
    """Run load_balancing_loss_func: each expert's share of tokens times its mean probability, over all layers."""
    memory = run.memory
    memory.scope = "auxiliary loss"
    experts = gate_logits[0][1].shape[-1]
    tokens_per_expert_sum = new_tensor(memory, (experts,), fp32, "tokens of experts")
    router_prob_sum = new_tensor(memory, (experts,), fp32, "sum of probabilities")
    flat_mask = total_rows = None
    if run.attention_mask is not None:
        flat_mask = cast(reshape(run.attention_mask, merge(*run.attention_mask.shape)), fp32)
    for layer, layer_gate in gate_logits:
        memory.enter(memory.phase, layer)
        routing_weights = softmax(layer_gate)
        _values, selected_experts = topk(routing_weights, top_k)
        chosen = merge(*selected_experts.shape)
        if flat_mask is None:
            tokens_per_expert_sum = tokens_per_expert_sum + counted(
                cast(reshape(selected_experts, chosen), fp32), experts
            )
            router_prob_sum = router_prob_sum + sum_first(cast(routing_weights, fp32))
        else:
            tokens_per_expert_sum = tokens_per_expert_sum + scattered(repeat_interleave(flat_mask, chosen), experts)
            router_prob_sum = router_prob_sum + sum_first(cast(routing_weights, fp32) * unsqueeze(flat_mask, 1))
            tokens = sum_all(flat_mask)
            total_rows = scale(tokens, "add") if total_rows is None else total_rows + tokens
            del tokens
    memory.enter(memory.phase, None)
    if total_rows is None:
        tokens_per_expert = scale(tokens_per_expert_sum, "div")
        router_prob_per_expert = scale(router_prob_sum, "div")
    else:
        tokens_per_expert = over(tokens_per_expert_sum, total_rows)
        router_prob_per_expert = over(router_prob_sum, total_rows)
    overall_loss = sum_all(tokens_per_expert * unsqueeze(router_prob_per_expert, 0))
    return scale(overall_loss, "mul")


def counted(chosen: Tensor, experts: Dim) -> Tensor:
    """Compute `torch.histc(chosen, bins=experts)`."""
    return new_tensor(chosen.memory, (experts,), fp32, "tokens of experts")


def scattered(rows: Tensor, experts: Dim) -> Tensor:
    """Compute `torch.zeros(experts).scatter_add_(0, chosen, rows)`."""
    return new_tensor(rows.memory, (experts,), fp32, "tokens of experts")

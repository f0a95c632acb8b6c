"""The two halves of a backward (torch/distributed/pipelining/_backward.py). The first computes the gradient of a
stage's input, which the previous stage waits for. The second computes the gradients of the stage's weights.

The first half runs the nodes that lead to the input. It keeps the graph, and the gradients that arrived at the nodes
where weights branch off. The second half continues from these nodes, weight by weight. So nearly everything that
forward saved is still alive between the halves: a node is held by the nodes before it, up to the last one that has a
weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from memcalc.core.autograd import Leaf, Node, Part, backward, run_graph
from memcalc.core.tensor import Tensor


@dataclass
class Group:
    """Weights that branch off at the same nodes (`intermediates`), and the gradients that have arrived there
    (`grads`)."""

    params: list[Leaf]
    intermediates: list[Node]
    nodes: set[Node] = field(default_factory=set[Node])
    """All nodes from the intermediates to the weights, both included."""
    grads: list[list[Tensor | None]] = field(default_factory=list[list["Tensor | None"]])


def stage_backward_input(
    output: Tensor,
    gradient: Tensor | None,
    given: Node,
    weights: Iterable[Leaf],
    queued: Callable[[], None],
) -> tuple[Tensor | None, list[Group]]:
    """Return the gradient of the input whose leaf is `given`, and the groups that the second half needs. `gradient` is
    None for a loss."""
    assert output.node is not None
    users = _users(output.node)
    to_input = _closure(given, users)
    groups = _groups(weights, users, to_input)
    watched: dict[Node, list[Tensor | None]] = {node: [] for group in groups for node in group.intermediates}
    part = Part(to_input, {given: None}, watched, retains=True)
    del users
    backward(output, queued, gradient, part)
    for group in groups:
        group.grads = [watched[node] for node in group.intermediates]
    return part.captured[given], groups


def stage_backward_weight(groups: list[Group]) -> None:
    """Compute the gradients of the weights, group by group.

    Frees and held variables are those of the real function: a group's gradients stay until the next group's are there.
    This matters where gradients are added to those of other micro-batches.
    """
    dweights: dict[Node, Tensor | None] = {}
    for group in groups:
        inbox: dict[Node, list[Tensor | None]] = {}
        grads = [list(one) for one in group.grads]
        for i, node in enumerate(group.intermediates):
            inbox[node] = list(grads[i])
        group.intermediates = []
        captured: dict[Node, Tensor | None] = dict.fromkeys(group.params)
        run_graph(group.params[0].memory, inbox, None, Part(group.nodes, captured, {}, retains=False))
        group.grads, group.nodes = [], set()
        dweights = captured
        for leaf, dw in dweights.items():
            assert isinstance(leaf, Leaf) and dw is not None
            leaf.run([dw])


def _users(root: Node) -> dict[Node, list[Node]]:
    """Return for each node the nodes that its gradient comes from (construct_reverse_graph)."""
    users: dict[Node, list[Node]] = defaultdict(list)
    stack = [root]
    while stack:
        node = stack.pop()
        for following, _ in node.edges:
            if following is not None:
                if following not in users:
                    stack.append(following)
                users[following].append(node)
    return users


def _closure(leaf: Node, users: dict[Node, list[Node]]) -> set[Node]:
    """Return all nodes that lead to a leaf."""
    closure, stack = {leaf}, [leaf]
    while stack:
        for user in users.get(stack.pop(), ()):
            if user not in closure:
                closure.add(user)
                stack.append(user)
    return closure


def _groups(weights: Iterable[Leaf], users: dict[Node, list[Node]], to_input: set[Node]) -> list[Group]:
    """Return the groups of weights (get_param_groups)."""
    found: dict[Node, Group] = {}
    out: list[Group] = []
    for weight in weights:
        between: set[Node] = {weight}
        stack: list[Node] = [weight]
        met: dict[Node, None] = {}
        while stack:
            for user in users.get(stack.pop(), ()):
                if user in to_input:
                    met[user] = None
                elif user not in between:
                    between.add(user)
                    stack.append(user)
        if not met:
            continue
        group = next((found[node] for node in met if node in found), None)
        if group is None:
            group = Group([], [])
            out.append(group)
        group.params.append(weight)
        group.intermediates += [node for node in met if node not in group.intermediates]
        group.nodes |= between | set(met)
        for node in met:
            found[node] = group
    return out

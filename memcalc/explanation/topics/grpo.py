"""GRPO: the models that are resident, and the phases of one iteration."""

from __future__ import annotations

from typing import Final

from memcalc.errors import InputError
from memcalc.explanation.exact import exact_step, states
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

BYTES: Final = "16 bytes of a parameter that trains, Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1"

TWO: Final = Rule(
    title=Words("GRPO holds a policy and a reference: 18Φ", "GRPO 常驻策略模型和参考模型：18Φ"),
    formula="16·Φ + 2·Φ",
    unit="bytes",
    counts=Words(
        "a policy that trains and a reference in 16 bits. There is no value model: the mean reward of a group takes its place.",
        "参与训练的策略模型和 16 位的参考模型；没有价值模型，由一组回答的平均奖励代替。",
    ),
    leaves_out=Words(
        "the cache of the rollout, activations, and that beta 0 or adapters need no reference.",
        "生成阶段的缓存和激活值；beta 为 0 或使用适配器时不需要参考模型。",
    ),
    quoted=Quoted(
        {"Φ": 7 * 10**9},
        126 * 10**9,
        0,
        f"{BYTES}; no value model: Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1 (formula)",
    ),
)
CACHE: Final = Rule(
    title=Words(
        "The cache of a rollout: 4·b·L·k·d bytes for each token", "生成阶段的 KV 缓存：每个 token 占 4·b·L·k·d 字节"
    ),
    formula="4·b·L·k·d·s",
    unit="bytes",
    counts=Words(
        "a key and a value of each key-value head in every layer, in 16 bits, of prompt and completion.",
        "每层每个 KV 头各一个键和值（16 位），覆盖提示和回答。",
    ),
    leaves_out=Words(
        "that the micro-batches of a step are generated together, and what a forward takes beside its cache.",
        "一步内的多个微批次会一起生成；以及前向计算在缓存之外所需的显存。",
    ),
    quoted=Quoted(
        {"b": 1, "L": 32, "k": 8, "d": 128, "s": 8192},
        2**30,
        0,
        "a page of vLLM, vllm/v1/kv_cache_interface.py: 2·block·heads·head_dim·itemsize (formula)",
    ),
)
_ROLLOUT: Final = Words(
    "beside what is held between steps, at the peak of the rollout ({phase})",
    "生成阶段（{phase}）峰值时，两步之间常驻部分以外的显存",
)


def beside(asked: Asked) -> Step:
    """Return the bytes at the peak of a rollout beside what is held in all of it."""
    rollout = asked.report.rollout
    if rollout is None:
        raise InputError(f"--task {asked.report.setup.task}: the rule is about generated text; allowed: grpo, ppo")
    highest = rollout.highest
    cache = sum(row.nbytes for row in highest.rows if row.name.startswith("KV cache"))
    return exact_step(asked, _ROLLOUT, {"cache": cache, "other": highest.nbytes - cache}, phase=highest.name)


TOPIC: Final = Topic(
    name="grpo",
    title=Words("GRPO (reinforcement learning)", "GRPO（强化学习）"),
    summary=Words(
        "generate, score, train: which models and caches are resident", "生成、打分、训练：哪些模型和缓存常驻"
    ),
    text=(
        Words(
            "An iteration has three phases. The policy generates completions, with a cache of keys and values. Models without "
            "gradients score them: the policy of before, a reference, a reward model. Then the policy trains on prompt and "
            "completion. The peak is the highest of these phases; weights and optimizer states are alive in all of them.",
            "一次迭代分三个阶段：策略模型带 KV 缓存生成回答；若干无梯度的模型（旧策略、参考模型、奖励模型）打分；"
            "随后策略模型在提示加回答上训练。峰值取各阶段的最大值，而权重和优化器状态在所有阶段都存活。",
        ),
        Words(
            "PPO also trains a value model (memcalc explain ppo). GRPO does not. What a phase does not need can be offloaded "
            "during it: the optimizer states are idle until the step, the reference and the reward model outside their one "
            "forward.",
            "PPO 还要训练价值模型（memcalc explain ppo），GRPO 不需要。某一阶段用不到的部分可以卸载："
            "优化器状态在更新之前闲置，参考模型和奖励模型在各自的一次前向之外闲置。",
        ),
    ),
    cases=(
        Case(
            TWO,
            states,
            Words(
                "Another precision or optimizer has other bytes for a parameter; engines shard the policy's states alone.",
                "其他精度或优化器下每个参数的字节数不同；引擎只对策略模型的状态分片。",
            ),
        ),
        Case(
            CACHE,
            beside,
            Words(
                "The cache grows by joining: one layer has its old and its new keys for a moment. Where a phase without a cache "
                "is higher, such as a reference's forward, its bytes are shown.",
                "缓存以拼接方式增长，某一层的新旧键会短暂同时存在。若没有缓存的阶段（如参考模型前向）更高，则显示该阶段的字节数。",
            ),
        ),
    ),
    options={"task": "grpo", "beta": 0.04, "micro_batch_size": 8},
)

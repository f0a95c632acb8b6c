"""PPO: four models, two of which train, and what its trainer keeps from one generation to the next."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import states
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.topics.grpo import BYTES
from memcalc.explanation.words import Words

FOUR: Final = Rule(
    title=Words("PPO holds four models: 36Φ", "PPO 常驻四个模型：36Φ"),
    formula="2·16·Φ + 2·2·Φ",
    unit="bytes",
    counts=Words(
        "a policy and a value model that train, 16 bytes a parameter each, and a reference and a reward model in 16 bits, all "
        "of one size.",
        "参与训练的策略模型和价值模型（各每参数 16 字节），以及 16 位的参考模型和奖励模型，四者大小相同。",
    ),
    leaves_out=Words(
        "caches and activations, and that value and reward models are often smaller, shared, or offloaded in between.",
        "缓存和激活值；价值模型和奖励模型往往更小、共享权重，或在阶段之间卸载。",
    ),
    quoted=Quoted(
        {"Φ": 7 * 10**9},
        252 * 10**9,
        0,
        f"{BYTES}; the four models: Yao et al., DeepSpeed-Chat, arXiv 2308.01320 (formula)",
    ),
)

TOPIC: Final = Topic(
    name="ppo",
    title=Words("PPO (reinforcement learning with a value model)", "PPO（带价值模型的强化学习）"),
    summary=Words(
        "four models, two of which train, and the logits of all responses",
        "四个模型（其中两个参与训练），以及全部回答的 logits",
    ),
    text=(
        Words(
            "An iteration has three phases. The policy generates a batch of completions. Then the reference, the value model "
            "and the reward model run over each of them, without gradients. Then policy and value model train together on it, "
            "for several epochs: one forward runs the value model and after it the policy, and backward goes through both.",
            "一次迭代分三个阶段：策略模型生成一批回答；随后参考模型、价值模型和奖励模型在无梯度下逐批打分；"
            "最后策略模型和价值模型一起在这批数据上训练若干轮：一次前向先运行价值模型，再运行策略模型，反向经过两者。",
        ),
        Words(
            "memcalc runs the code of TRL 1.12, the last one with a PPOTrainer. Its training step keeps more than a loss needs: "
            "all logits, whose log-probabilities are computed one sequence after the other; the hidden states between the "
            "layers of both models; and a copy of all keys and values, since nobody switches the cache off.",
            "memcalc 运行的是 TRL 1.12 的代码，即最后一个含 PPOTrainer 的版本。它的训练步保留的内容多于损失所需：全部 logits（"
            "逐条序列计算对数概率）、两个模型各层之间的隐藏状态，以及所有键和值的一份拷贝，因为没有关闭缓存。",
        ),
        Words(
            "generate is asked for the scores of all its steps: an fp32 number for each word and generated token. The trainer "
            "joins them to one tensor, which it holds until the next generation has a new one. For a moment there are three.",
            "generate 被要求返回每一步的分数：每个词、每个生成的 token 一个 fp32 数。训练器把它们拼成一个张量，一直保留到下一次"
            "生成产生新的张量；短时间内会同时存在三份。",
        ),
    ),
    cases=(
        Case(
            FOUR,
            states,
            Words(
                "The value model and the reward model have a score of one output in place of the head. ZeRO shards gradients "
                "and states of the policy and the value model alone. Buffers, caches and activations do not count.",
                "价值模型和奖励模型用一个单输出的打分层代替输出头。ZeRO 只对策略模型和价值模型的梯度和状态分片。"
                "不计缓冲区、缓存和激活值。",
            ),
        ),
    ),
    options={"task": "ppo", "micro_batch_size": 4},
)

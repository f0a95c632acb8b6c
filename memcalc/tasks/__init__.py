"""Tasks, which a step trains for: fine-tuning, preference tuning and reinforcement learning as TRL runs them. Pretraining is
the programs themselves."""

PREFERENCE = ("dpo", "kto")
"""The tasks that compare the policy with a reference model."""

ONLINE = ("grpo", "ppo")
"""The tasks that generate what they train on."""

OF_TRL = ("sft", *PREFERENCE, *ONLINE)
"""The tasks that one of TRL's trainers runs, with its own LM head."""

GENERATIONS = 8
"""TRL's num_generations, where GRPO is not told otherwise."""

TRL = "TRL 1.16"
"""The version that the tasks are written from."""

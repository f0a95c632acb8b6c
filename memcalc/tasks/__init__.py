"""Tasks, which a step trains for: preference tuning as TRL runs it. Pretraining is the programs themselves."""

PREFERENCE = ("dpo", "kto")
"""The tasks that compare the policy with a reference model."""

TRL = "TRL 1.16"
"""The version that the tasks are written from."""

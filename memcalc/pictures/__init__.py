"""Pictures of a step: its timeline, block by block, and what draws it or writes it for other programs."""

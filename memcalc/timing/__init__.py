"""The time of a training step: its kernels, its optimizer, its collectives, and how they overlap."""

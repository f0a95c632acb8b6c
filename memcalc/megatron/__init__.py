"""Megatron-Core's GPTModel on paper: its layouts, its collectives, its pipeline schedules."""

"""Megatron-Core: its distributed optimizer, buffers and collectives."""

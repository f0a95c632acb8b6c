"""FSDP1: `FullyShardedDataParallel`, whose units are flat parameters."""

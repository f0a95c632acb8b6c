"""FSDP2 (torch's fully_shard), its pipelines and the sizes of its shards."""

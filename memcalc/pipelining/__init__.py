"""Pipeline parallelism as torch.distributed.pipelining does it: orders, stages, and a step of one rank on paper."""

"""torch.nn.DataParallel: one process, one model, a replica on every GPU while a step runs."""

"""From live tensors to what tools show of a GPU: the caching allocator's rules, a process played through them, the verdict."""

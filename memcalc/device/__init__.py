"""From live tensors to what tools show of a GPU: the caching allocator, a run played through it, and the verdict."""

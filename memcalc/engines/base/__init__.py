"""What several engines share: what is held, the order of allocations, what is sent, clipping."""

"""Parts that several engines use: holdings, the order of allocations, collectives, clipping."""

"""The parts of families: modules, programs, configurations, blocks, masks, and mechanisms that several families use."""

"""What families are made of: modules, programs, configurations, blocks, masks, and mechanisms that several families share."""

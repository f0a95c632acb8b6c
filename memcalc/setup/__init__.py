"""Options as given become a setup: defaults resolved, and what no engine does refused."""

"""The setup of given options: defaults are resolved, and combinations that no engine runs are refused."""

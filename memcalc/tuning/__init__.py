"""The choice of what trains: frozen parts of a model."""

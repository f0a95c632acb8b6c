"""What comes from outside: model configurations, GPUs, options. pydantic checks it here, frozen dataclasses leave."""

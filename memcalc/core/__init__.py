"""The framework without data: sizes, dtypes, tensors, ops and a tiny autograd. It knows no model and no engine."""

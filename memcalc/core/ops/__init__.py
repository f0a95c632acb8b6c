"""The ops that programs are written with. Each follows PyTorch's own rules (tools/autograd/derivatives.yaml)."""

"""The ops that programs are written with. Each saves and allocates by PyTorch's own rules
(tools/autograd/derivatives.yaml)."""

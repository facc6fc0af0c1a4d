"""Transformer ops, one module per family; `torch_ops` is the reference implementation."""

"""One module per drafting method, of the same name, each with an entry `METHOD`.

A module has the implementations for CPU and GPU. GPU-only imports are deferred until the method is
loaded on a GPU: the CUDA packages may not be installed.
"""

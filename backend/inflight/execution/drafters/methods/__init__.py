"""One module per method of drafting, of the same name, each with an entry `METHOD`.

A module holds the CPU's side and the GPU's. What only a GPU's runner needs is imported when that
loads it: the CUDA packages may not be installed.
"""

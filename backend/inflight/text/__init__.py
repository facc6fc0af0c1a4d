"""Tokenization: text to ids (`tokenizer`, `chat`) and ids to text (`detokenize`).

Imports no torch: the fronts in Triton's stub processes use it.
"""

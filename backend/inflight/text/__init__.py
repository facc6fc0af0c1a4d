"""Text on both ends of a model: text -> ids (`tokenizer`, `chat`) and ids -> text (`detokenize`).

Nothing in here knows tensors or torch: the fronts in Triton's stub processes import it.
"""

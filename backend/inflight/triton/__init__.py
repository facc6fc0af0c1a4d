"""Code in Triton's stub processes: thin fronts between tensors and the engine."""

"""The running batch on a GPU, and what its steps upload."""

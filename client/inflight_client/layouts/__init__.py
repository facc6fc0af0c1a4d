"""How servers name the models and tensors of a completion."""

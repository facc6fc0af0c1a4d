"""The tensors of TensorRT-LLM's backend for Triton."""

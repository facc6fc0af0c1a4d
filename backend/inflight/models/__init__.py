"""The models that can run: their settings, their weights, their forward passes.

Importing this package or `models.config` does not import torch; the architectures' own modules do.
"""

from __future__ import annotations

# Architecture, as a checkpoint names it (`model_type`, `general.architecture`) -> the module whose
# class `Model` runs it on a CPU, and that for a GPU. Mistral without sliding windows is Llama.
ARCHITECTURES: dict[str, str] = {
    "llama": "inflight.models.llama",
    "mistral": "inflight.models.llama",
}
CUDA_ARCHITECTURES: dict[str, str] = {
    "llama": "inflight.models.llama_cuda",
    "mistral": "inflight.models.llama_cuda",
}

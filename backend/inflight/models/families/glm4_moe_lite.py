"""GLM-4.7 Flash (arXiv:2508.06471): the layers of DeepSeek V3."""

from __future__ import annotations

from inflight.models.families import deepseek_v3
from inflight.models.family import Family

FAMILY = Family(
    name="glm4_moe_lite",
    layers=deepseek_v3.layers,
    model_types=("glm4_moe_lite",),
    # Its GGUF files are those of DeepSeek V3.
    defaults={"q_lora_rank": 768, "norm_topk_prob": True, "first_k_dense_replace": 1},
    tensors=deepseek_v3.FAMILY.tensors,
    rope_pairs=deepseek_v3.FAMILY.rope_pairs,
    has_nextn=True,
    ignored_keys=deepseek_v3.FAMILY.ignored_keys,
)

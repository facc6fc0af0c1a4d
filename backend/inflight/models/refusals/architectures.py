"""Architectures that are known and not supported: what they are, and the nearest that works.

The names are `model_type` in config.json and `general.architecture` in GGUF files. A name that a
family claims is never refused here: to support one, add the family; its row here then has no
effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.checkpoint.checked_fields import CheckedFields
from inflight.checkpoint.gguf import GgufFile
from inflight.errors import ConfigError

_EXPERTS = "it is a mixture of experts of a kind that is not supported"
_RECURRENT = (
    "it has recurrent layers (a state-space model, linear attention or convolutions), which need a "
    "state per sequence and not only a KV cache"
)
_GRANITE_4 = "its layers can be recurrent (Mamba 2) or mixtures of experts"
_LATENT = "it has latent attention (MLA), whose KV cache is compressed"
_MULTIMODAL = "it reads images, audio or video as well as text, and only text models are supported"
_ENCODER = "it is an encoder, for embeddings or classes, and does not generate text"
_ENCODER_DECODER = "it has an encoder beside the decoder, and only decoders are supported"
_DIFFUSION = "it generates text by diffusion, not token by token"


@dataclass(frozen=True, slots=True)
class _Row:
    """Architectures that are refused for one reason.

    Attributes:
        reason: what they are, as a clause.
        names: of the architectures, separated by spaces.
        nearest: architectures that come close, the closest one first; the first one that is
            supported is recommended.
    """

    reason: str
    names: str
    nearest: tuple[str, ...] = ("llama",)


_ROWS = (
    _Row(_EXPERTS, "grovemoe", ("qwen3_moe", "qwen3moe", "qwen3")),
    _Row(_EXPERTS, "flex_olmo", ("olmoe", "olmo2", "llama")),
    _Row(_EXPERTS, "granitemoe_swa", ("granitemoe", "granite", "llama")),
    _Row(
        f"{_EXPERTS}, and it has latent attention (MLA)",
        "deepseek_v4 kimi_k2 mistral4 longcat_flash",
        ("deepseek_v3", "deepseek2", "llama"),
    ),
    _Row(
        "its latent attention (MLA) reads a choice of the keys (sparse attention)",
        "deepseek_v32 glm_moe_dsa glm-dsa",
        ("deepseek_v3", "deepseek2", "llama"),
    ),
    _Row(_EXPERTS, "deepseek dots1", ("deepseek_v2", "deepseek2", "llama")),
    _Row(_EXPERTS, "phimoe", ("phi3", "llama")),
    _Row(_EXPERTS, "llama4_text"),
    _Row(_EXPERTS, "cohere2_moe", ("cohere2", "llama")),
    _Row(_EXPERTS, "exaone_moe exaone-moe", ("exaone4", "qwen3")),
    _Row(_EXPERTS, "ernie4_5_moe ernie4_5-moe", ("ernie4_5", "llama")),
    _Row(
        _EXPERTS, "hunyuan_v1_moe hunyuan-moe", ("hunyuan_v1_dense", "hunyuan-dense", "llama")
    ),
    _Row(_EXPERTS, "bailingmoe bailing_moe bailingmoe2 minimax_m2 minimax-m2 mimo2 afmoe jetmoe"),
    _Row(_EXPERTS, "dbrx arctic grok grok-1 smallthinker solar_open step35 laguna", ("llama",)),
    _Row(_LATENT, "minicpm3 plm youtu"),
    _Row(_RECURRENT, "mamba mamba2 falcon_mamba rwkv rwkv6 rwkv7 rwkv6qwen2 arwkv7 xlstm"),
    _Row(_RECURRENT, "jamba zamba zamba2 bamba falcon_h1 falcon-h1 plamo2"),
    _Row(_RECURRENT, "nemotron_h nemotron_h_moe", ("nemotron", "llama")),
    _Row(_GRANITE_4, "granitemoehybrid granitehybrid", ("granite", "llama")),
    _Row(
        _RECURRENT,
        "qwen3_next qwen3next qwen3_5_text qwen3_5_moe_text qwen35 qwen35moe",
        ("qwen3",),
    ),
    _Row(_RECURRENT, "lfm2 lfm2_moe lfm2moe lfm3 minimax kimi_linear kimi-linear bailing_hybrid"),
    _Row(_RECURRENT, "recurrent_gemma", ("gemma2", "gemma", "llama")),
    _Row(_RECURRENT, "olmo_hybrid", ("olmo3", "olmo2", "llama")),
    _Row(_MULTIMODAL, "qwen2_vl qwen2_5_vl qwen2vl qwen2_audio", ("qwen2",)),
    _Row(
        _MULTIMODAL,
        "qwen3_vl qwen3_vl_moe qwen3vl qwen3vlmoe qwen3_5 qwen3_5_moe qwen3_omni_moe qwen2_5_omni",
        ("qwen3",),
    ),
    _Row(
        _MULTIMODAL,
        "gemma3 gemma3n gemma3n_text gemma4 gemma4_text paligemma",
        ("gemma3_text", "gemma3", "gemma2", "llama"),
    ),
    _Row(_MULTIMODAL, "mistral3 pixtral voxtral", ("ministral3", "mistral")),
    _Row(_MULTIMODAL, "phi3_v phi4mm phi4_multimodal", ("phi3", "llama")),
    _Row(_MULTIMODAL, "llama4 mllama llava llava_next llava_onevision idefics2 idefics3 smolvlm"),
    _Row(_MULTIMODAL, "internvl internvl_chat cogvlm chameleon fuyu emu3 aria blip-2 kosmos-2"),
    _Row(_MULTIMODAL, "hunyuan_vl paddleocr deepseek2-ocr glm4v glm4v_moe clip whisper"),
    _Row(_ENCODER, "bert roberta xlm-roberta distilbert albert electra deberta deberta-v2", ()),
    _Row(_ENCODER, "modernbert modern-bert nomic_bert nomic-bert nomic-bert-moe mpnet ernie", ()),
    _Row(_ENCODER, "neo-bert eurobert jina-bert-v2 jina-bert-v3 gemma-embedding llama-embed", ()),
    _Row(_ENCODER, "t5encoder", ()),
    _Row(_ENCODER_DECODER, "t5 mt5 umt5 longt5 switch_transformers t5gemma t5gemma2 flan-t5", ()),
    _Row(_ENCODER_DECODER, "bart mbart marian pegasus m2m_100 nllb-moe led encoder-decoder", ()),
    _Row(_DIFFUSION, "dream llada llada-moe rnd1", ()),
)  # fmt: skip

_BY_NAME: Mapping[str, _Row] = {name: row for row in _ROWS for name in row.names.split()}

# Of architectures in no row: settings whose values, if not 0, tell what it is.
_SIGNS = (
    (_EXPERTS, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    (_RECURRENT, ("mamba_d_state", "ssm_state_size", "state_size", "linear_num_value_heads")),
    (_LATENT, ("kv_lora_rank",)),
    (_MULTIMODAL, ("vision_config", "audio_config", "text_config")),
    (_ENCODER_DECODER, ("is_encoder_decoder",)),
)
_GGUF_SIGNS = (
    (_EXPERTS, ("expert_count",)),
    (_RECURRENT, ("ssm.state_size", "wkv.head_size", "shortconv.l_cache")),
    (_LATENT, ("attention.kv_lora_rank",)),
    (_ENCODER, ("pooling_type",)),
)

# Ends of class names in `architectures` of models that have no output layer for text.
_TASKS = {
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a classifier",
    "ForQuestionAnswering": "a classifier",
    "RewardModel": "a reward model",
    "ForMaskedLM": "an encoder",
    "Model": "a model without an output layer, for embeddings",
}


def refuse_folder(fields: CheckedFields, supported: Collection[str]) -> None:
    """Refuse a folder whose architecture is known and not supported.

    Args:
        fields: of its config.json.
        supported: `model_type` of all families.

    Raises:
        ConfigError: it is; the message says what the architecture is, and what comes close.
    """
    name = fields.text("model_type")
    if name in supported:
        _refuse_task(fields)
        return
    row = _BY_NAME.get(name) or _row_of_signs(_SIGNS, fields)
    text_config = fields.get("text_config")
    if isinstance(text_config, dict):
        raise _wrapper_refusal(fields, name, text_config, supported)
    if row is not None:
        raise _refusal(f"{fields.where}: model_type", name, row, supported)


def refuse_gguf(file: GgufFile, name: str, supported: Collection[str]) -> None:
    """Refuse a GGUF file whose architecture is known and not supported.

    Args:
        file: the GGUF file.
        name: of its architecture.
        supported: `general.architecture` of all families.

    Raises:
        ConfigError: as `refuse_folder`.
    """
    where = f"{file.path}: general.architecture"
    if name not in supported:
        fields = CheckedFields(_without_prefix(file.metadata, name), where)
        row = _BY_NAME.get(name) or _row_of_signs(_GGUF_SIGNS, fields)
        if row is not None:
            raise _refusal(where, name, row, supported)


def _refuse_task(fields: CheckedFields) -> None:
    names = fields.get("architectures") or []
    if not isinstance(names, list):
        raise fields.error(f"architectures: {names!r}; allowed: a list of class names")
    if any(str(name).endswith("ForCausalLM") for name in names):
        return
    for name in map(str, names):
        what = next((what for end, what in _TASKS.items() if name.endswith(end)), None)
        if what is not None:
            raise fields.error(
                f"architectures: {name} is {what}, and does not generate text; allowed: "
                "...ForCausalLM; use the language model that it was made from"
            )


def _wrapper_refusal(
    fields: CheckedFields, name: str, text_config: dict[str, Any], supported: Collection[str]
) -> ConfigError:
    """Of a model whose settings of the text part are in text_config."""
    text_type = text_config.get("model_type")
    if isinstance(text_type, str) and text_type in supported:
        return fields.error(
            f"model_type: the architecture {name!r} is not supported: {_MULTIMODAL}; its text part "
            "alone is: use a GGUF file of this model, which holds that part only, or a folder with "
            f"text_config as its config.json (model_type {text_type!r}) and the tensors of the "
            "text part, under the names that they have in text models"
        )
    of_text = _BY_NAME.get(str(text_type)) or _row_of_signs(_SIGNS, CheckedFields(text_config, ""))
    nearest = (_BY_NAME.get(name) or of_text or _Row("", name)).nearest
    reason = _MULTIMODAL
    if text_type is not None:
        reason += f"; its text part, {text_type!r}, is not supported either"
        reason += f": {of_text.reason}" if of_text is not None else ""
    where = f"{fields.where}: model_type"
    return _refusal(where, name, _Row(reason, name, nearest), supported)


def _row_of_signs(
    signs: tuple[tuple[str, tuple[str, ...]], ...], fields: CheckedFields
) -> _Row | None:
    for reason, keys in signs:
        for key in keys:
            if fields.get(key):
                return _Row(f"{reason} ({key})", "")
    return None


def _refusal(where: str, name: str, row: _Row, supported: Collection[str]) -> ConfigError:
    nearest = next((one for one in row.nearest if one in supported), None)
    advice = f"; use a model of the architecture {nearest!r}" if nearest is not None else ""
    return ConfigError(
        f"{where}: the architecture {name!r} is not supported: {row.reason}{advice}; allowed: "
        f"{', '.join(supported)}"
    )


def _without_prefix(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }

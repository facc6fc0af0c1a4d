"""Inputs of TensorRT-LLM's models as inputs of the model `llm`. All have a batch dimension of 1."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from inflight.errors import ConfigError, RequestError
from inflight.text.tokenizer import Tokenizer
from inflight.triton import contract, protocol
from inflight.triton.contract import Array, Tensor

# Names of one meaning: those of the models that take text, and of the model that takes token ids.
_RENAMED = {
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "random_seed": "seed",
    "streaming": "stream",
    "num_return_sequences": "n",
}
_PASSED = (
    "max_tokens",
    "min_tokens",
    "min_length",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_words",
    "bad_words",
    "end_id",
    "ignore_eos",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "stream",
    "return_log_probs",
    "n",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
)
_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_OF_BEAMS = ("length_penalty", "early_stopping")

_LORA = "LoRA adapters are not supported"
_ENCODER = "encoder-decoder models are not supported"
_MULTIMODAL = "only text is supported"
_PROMPT_TABLE = "prompt tuning is not supported"
_LOGITS = "logits are not returned; allowed: return_log_probs"
_DRAFTS = "drafts are made by the engine (speculative_config of engine.json)"
_RETENTION = "priorities of cached tokens are not supported"
_REFUSED: dict[str, str] = {
    "return_context_logits": _LOGITS,
    "return_generation_logits": _LOGITS,
    "return_perf_metrics": "metrics of a request are not returned in this form",
    "prompt_embedding_table": _PROMPT_TABLE,
    "prompt_table_extra_id": _PROMPT_TABLE,
    "prompt_table_extra_ids": _PROMPT_TABLE,
    "prompt_vocab_size": _PROMPT_TABLE,
    "lora_task_id": _LORA,
    "lora_weights": _LORA,
    "lora_config": _LORA,
    "decoder_text_input": _ENCODER,
    "decoder_input_ids": _ENCODER,
    "decoder_input_lengths": _ENCODER,
    "encoder_input_features": _ENCODER,
    "encoder_output_lengths": _ENCODER,
    "image_input": _MULTIMODAL,
    "image_bytes_input": _MULTIMODAL,
    "image_url_input": _MULTIMODAL,
    "video_bytes_input": _MULTIMODAL,
    "num_draft_tokens": _DRAFTS,
    "use_draft_logits": _DRAFTS,
    "draft_input_ids": _DRAFTS,
    "draft_logits": _DRAFTS,
    "draft_acceptance_threshold": _DRAFTS,
    "lookahead_window_size": _DRAFTS,
    "lookahead_ngram_size": _DRAFTS,
    "lookahead_verification_set_size": _DRAFTS,
    "runtime_top_p_min": "top_p does not change within an output",
    "runtime_top_p_decay": "top_p does not change within an output",
    "runtime_top_p_reset_ids": "top_p does not change within an output",
    "beam_search_diversity_rate": "beams are not diversified",
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
    "context_phase_params": "prefill and decode are not separated",
    "cross_attention_mask": _ENCODER,
    "skip_cross_attn_blocks": _ENCODER,
    "mrope_rotary_cos_sin": _MULTIMODAL,
    "mrope_position_deltas": _MULTIMODAL,
    "DECODER_QUERY": _ENCODER,
    "IMAGE_BYTES": _MULTIMODAL,
    "IMAGE_URL": _MULTIMODAL,
    "VIDEO_BYTES": _MULTIMODAL,
    "PROMPT_TABLE_EXTRA_ID": _PROMPT_TABLE,
}
"""Inputs that are accepted only if all their values are zero, and why."""


def client_names(inputs: Mapping[str, Array]) -> dict[str, str]:
    """The client's names of the inputs that have another one here."""
    return {ours: name for name, ours in _RENAMED.items() if name in inputs}


def unbatched(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors without their batch dimension.

    Raises:
        RequestError: the batch is not one request, or an input is not supported.
    """
    found = {}
    for name, array in inputs.items():
        if array.ndim < 1 or array.shape[0] != 1:
            raise RequestError(
                f"has shape {list(array.shape)}; allowed: a batch of 1, [1, ...]: send each prompt "
                "as a request of its own",
                name,
            )
        found[name] = array[0]
        if name in _REFUSED and any(array.reshape(-1).tolist()):
            raise RequestError(f"is not supported: {_REFUSED[name]}; omit it", name)
    return found


def options(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Options under our names.

    As in TensorRT-LLM, top_k and top_p of 0 are off, and without either of them the most probable
    token is taken, whatever the temperature; a negative end_id disables the end-of-sequence token;
    a beam search returns all beams unless num_return_sequences is set.

    Args:
        inputs: without their batch dimension; others than options are skipped.

    Raises:
        RequestError: an input is not allowed.
    """
    with protocol.client_names(client_names(inputs)):
        return _options({_RENAMED.get(name, name): array for name, array in inputs.items()})


def _options(renamed: Mapping[str, Array]) -> dict[str, Array]:
    found = {name: renamed[name] for name in _PASSED if name in renamed}
    if _number(found, "end_id", 0) < 0:
        del found["end_id"]
        if "guided_decoding_guide_type" not in found:
            found["ignore_eos"] = np.array([True])
    width = _number(found, "beam_width", 1)
    if width > 1:
        found.setdefault("n", found["beam_width"])
    else:
        found.pop("beam_width", None)
    for name in _SAMPLING if width > 1 else _OF_BEAMS:
        found.pop(name, None)
    if width <= 1:
        _select_sampling(found)
    return found


def _select_sampling(found: dict[str, Array]) -> None:
    for name in ("top_k", "top_p"):
        if _number(found, name, 0) == 0:
            found.pop(name, None)
    if "top_k" not in found and "top_p" not in found:
        found["temperature"] = np.array([0.0], np.float32)
        found.pop("seed", None)
    else:
        found.setdefault("temperature", np.array([1.0], np.float32))


def _number(found: Mapping[str, Array], name: str, default: int) -> float:
    if name not in found:
        return default
    (tensor,) = (one for one in contract.OPTIONS if one.name == name)
    return float(contract.read(tensor, found[name]))


EXCLUDE_INPUT = "exclude_input_in_output"


def excludes_input(parameters: Mapping[str, str]) -> bool:
    """The default of EXCLUDE_INPUT, a parameter of config.pbtxt. Raises ConfigError: not a flag."""
    text = parameters.get(EXCLUDE_INPUT, "false").lower()
    if text not in ("true", "false"):
        raise ConfigError(f"config.pbtxt: {EXCLUDE_INPUT} is {text!r}; allowed: true, false")
    return text == "true"


def excluded(inputs: Mapping[str, Array], stream: bool | None, default: bool) -> Array:
    """The input EXCLUDE_INPUT: a stream never has the prompt."""
    found = contract.read_flag(EXCLUDE_INPUT, inputs)
    return np.array([bool(stream or (default if found is None else found))])


def word_biases(
    words: Tensor, weights: Tensor, inputs: Mapping[str, Array], tokenizer: Tokenizer
) -> dict[int, float]:
    """The bias of each token. All tokens of a text get its bias; those of a token in several texts
    add up.

    Args:
        words, weights: the inputs with texts and their biases.

    Raises:
        RequestError: one of the inputs is missing, or they have different lengths.
    """
    if words.name not in inputs and weights.name not in inputs:
        return {}
    texts: list[str] = contract.read_required(words, inputs)
    values: list[float] = contract.read_required(weights, inputs)
    if len(texts) != len(values):
        raise RequestError(
            f"{len(texts)} texts and {len(values)} weights; allowed: as many as of {weights.name}",
            words.name,
        )
    biases: dict[int, float] = {}
    for text, value in zip(texts, values, strict=True):
        for token_id in tokenizer.encode(text, False, words.name):
            biases[token_id] = biases.get(token_id, 0.0) + value
    return biases


def logit_biases(biases: Mapping[int, float]) -> dict[str, Array]:
    """The tensors of `logit_bias`."""
    return {
        "logit_bias_ids": np.array(list(biases), np.int32),
        "logit_bias_values": np.array(list(biases.values()), np.float32),
    }


def log_probs(texts: list[str], cumulative: list[float]) -> dict[str, Array]:
    """The outputs cum_log_probs, of shape [1, outputs], and output_log_probs, [1, outputs, tokens]
    with zeros after the end of a shorter output.

    Args:
        texts: JSON of the output `logprobs` of each output, see `protocol.outputs`.
        cumulative: sums of the outputs so far.
    """
    rows = [_chosen(text) for text in texts]
    table = np.zeros((1, len(rows), max(map(len, rows), default=0)), np.float32)
    for place, row in enumerate(rows):
        table[0, place, : len(row)] = row
    return {"cum_log_probs": np.array([cumulative], np.float32), "output_log_probs": table}


def _chosen(text: str) -> list[float]:
    """Log-probabilities of the tokens themselves, which come first."""
    tokens = json.loads(text) if text else []
    return [next(iter(token.values()))["logprob"] for token in tokens]

"""The tensors of every model, as one table: for reading them, for error messages, and for the test
that holds the config.pbtxt files to it.

Knows nothing of Triton's Python API: a tensor is a name and a numpy array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from inflight.errors import RequestError, did_you_mean

Array = npt.NDArray[Any]
Datatype = Literal["STRING", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32"]

NUMPY: dict[Datatype, np.dtype[Any]] = {
    "STRING": np.dtype(object),
    "BOOL": np.dtype(np.bool_),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "FP32": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor.

    Attributes:
        dims: [dims]; -1 is any length.
        meaning: one sentence for people.
        required: whether the model cannot do without it. Where the tokenizers are concerned it is
            optional for Triton all the same: an ensemble whose first step lacks its only input
            ends with an empty success, where the step itself can say what is missing.
    """

    name: str
    datatype: Datatype
    meaning: str
    dims: int = 1
    required: bool = False


@dataclass(frozen=True, slots=True)
class Contract:
    """Inputs and outputs of a model."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


OPTIONS = (
    Tensor(
        "max_tokens",
        "INT32",
        "Output tokens at most; 0, for the prompt alone, with echo or num_prompt_logprobs.",
    ),
    Tensor("min_tokens", "INT32", "No end-of-sequence token before this many output tokens."),
    Tensor("min_length", "INT32", "Another name of min_tokens."),
    Tensor("stream", "BOOL", "Answer as the text grows, not once at the end."),
    Tensor("temperature", "FP32", "0 is greedy."),
    Tensor("top_k", "INT32", "Draw from the k likeliest tokens; 0 and -1 mean all."),
    Tensor("top_p", "FP32", "Draw from the likeliest tokens that together have this probability."),
    Tensor("min_p", "FP32", "Draw from tokens with this share of the likeliest one's probability."),
    Tensor("typical_p", "FP32", "Draw from tokens about as surprising as the mean, to this share."),
    Tensor("top_n_sigma", "FP32", "Draw from logits so many deviations below the largest; 0: all."),
    Tensor("xtc_threshold", "FP32", "XTC: from this probability on, tokens are top choices."),
    Tensor("xtc_probability", "FP32", "XTC: how often all top choices but the last are excluded."),
    Tensor("repetition_penalty", "FP32", "Above 1 makes tokens of prompt and output less likely."),
    Tensor("presence_penalty", "FP32", "Subtracted once from tokens that stand in the output."),
    Tensor("frequency_penalty", "FP32", "Subtracted per occurrence in the output."),
    Tensor("dry_multiplier", "FP32", "DRY: what a repeated string of tokens costs its next one."),
    Tensor("dry_base", "FP32", "DRY: the cost grows by this factor with each repeated token."),
    Tensor("dry_allowed_length", "INT32", "DRY: shorter strings may be repeated."),
    Tensor("dry_penalty_last_n", "INT32", "DRY looks at so many last tokens; -1: all, 0: off."),
    Tensor("dry_sequence_breakers", "STRING", "DRY: no string goes across one of these.", dims=-1),
    Tensor("no_repeat_ngram_size", "INT32", "No string of so many tokens comes twice; 0: off."),
    Tensor("logit_bias_ids", "INT32", "Tokens to make more or less likely.", dims=-1),
    Tensor("logit_bias_values", "FP32", "What is added to the logits of these.", dims=-1),
    Tensor("allowed_token_ids", "INT32", "Tokens that alone may be generated.", dims=-1),
    Tensor("seed", "UINT64", "The same seed gives the same text."),
    Tensor("stop_words", "STRING", "Strings that end the output and are not part of it.", dims=-1),
    Tensor("bad_words", "STRING", "Strings that are never generated.", dims=-1),
    Tensor("end_id", "INT32", "A further end-of-sequence token."),
    Tensor("ignore_eos", "BOOL", "Go on past the end-of-sequence token."),
    Tensor("exclude_input_in_output", "BOOL", "False puts the prompt in front of the output."),
    Tensor("echo", "BOOL", "True does so too, and with num_logprobs reports the prompt's as well."),
    Tensor("return_num_input_tokens", "BOOL", "Accepted; the count is always there."),
    Tensor("return_num_output_tokens", "BOOL", "Accepted; the count is always there."),
    Tensor("sampling_parameters", "STRING", "Options as a JSON object, in vLLM's names."),
    Tensor("cache_salt", "STRING", "Cached prefixes are shared only under the same salt."),
    Tensor("n", "INT32", "Outputs per prompt; with a seed, output i has seed + i."),
    Tensor("best_of", "INT32", "Outputs to compute, of which the n likeliest are the answer."),
    Tensor("beam_width", "INT32", "Beams of a search for the n likeliest outputs; 1 is no search."),
    Tensor("length_penalty", "FP32", "Beams count by log-probability / length ** this."),
    Tensor("early_stopping", "BOOL", "End a search as soon as beam_width beams have ended."),
    Tensor(
        "speculation",
        "STRING",
        "Drafted tokens per step: auto, off or a number. Changes the speed, never the output.",
    ),
    Tensor(
        "num_logprobs", "INT32", "Likeliest tokens to report for each output token; see logprobs."
    ),
    Tensor(
        "num_prompt_logprobs",
        "INT32",
        "Likeliest tokens to report for each prompt token; see prompt_logprobs.",
    ),
    Tensor("return_log_probs", "BOOL", "Report each output token, as num_logprobs 0 does."),
    Tensor(
        "guided_decoding_guide_type",
        "STRING",
        "What the output must match: json, json_schema, regex, ebnf_grammar or choice.",
    ),
    Tensor("guided_decoding_guide", "STRING", "The schema, expression, grammar or choices."),
    Tensor("priority_class", "STRING", "Not in this version."),
    Tensor("deadline_ms", "INT32", "Not in this version."),
)

NUM_INPUT_TOKENS = Tensor("num_input_tokens", "UINT32", "Tokens of the prompt.")

# Every response carries all of them.
ANSWER = (
    Tensor("index", "UINT32", "Which of n outputs each of the others is about.", dims=-1),
    Tensor("finish_reason", "STRING", "stop, length or cancelled; empty until the end.", dims=-1),
    NUM_INPUT_TOKENS,
    Tensor(
        "num_output_tokens",
        "UINT32",
        "Tokens of this response: a stream's sum is the total.",
        dims=-1,
    ),
    Tensor(
        "cumulative_logprob",
        "FP32",
        "Sum of the output tokens' log-probabilities so far.",
        dims=-1,
    ),
    Tensor(
        "logprobs",
        "STRING",
        "A JSON list, of each new token {id: {logprob, rank, decoded_token}}, itself first; empty "
        "unless num_logprobs asks for it.",
        dims=-1,
    ),
    Tensor(
        "prompt_logprobs",
        "STRING",
        "The same of each prompt token, null for the first; empty unless num_prompt_logprobs or "
        "echo asks for it. In a stream in parts, the last one with the first output token.",
    ),
    Tensor(
        "draft_stats",
        "STRING",
        "At the end, where tokens were drafted: JSON of num_drafted, num_accepted, num_steps and "
        "tokens_per_step.",
        dims=-1,
    ),
)

TEXT_INPUT = Tensor("text_input", "STRING", "The prompt.", required=True)
MESSAGES = Tensor("messages", "STRING", "A chat as a JSON list of messages.", required=True)
TEXT_OUTPUT = Tensor("text_output", "STRING", "New text: valid UTF-8, always.", dims=-1)

INPUT_IDS = Tensor("input_ids", "INT32", "Token ids of the prompt.", dims=-1, required=True)
PROMPT_TENSOR = Tensor(
    "prompt_tensor",
    "STRING",
    "Set by our tokenizers alone: the tensor that the prompt came from. It also says that a "
    "detokenizer follows, which reports what it delivered.",
)
PROMPT_ERROR = Tensor(
    "prompt_error",
    "STRING",
    "Set by our tokenizers alone, in place of a prompt that they refuse: why, as JSON of kind and "
    "message. The model llm answers the request with that error.",
)
DETOKENIZE_IDS = Tensor("detokenize_ids", "INT32", "A window of ids, then the new ones.", dims=-1)
DETOKENIZE_STATE = Tensor(
    "detokenize_state",
    "INT64",
    "Of each output: ids, length of the window, characters to trim, 1 at the end, request id, "
    "position.",
    dims=-1,
)
DETOKENIZE_STATE_SIZE = 6
"""Of one output."""

_PROMPT = (INPUT_IDS, PROMPT_TENSOR)
_TOKENIZED = (*_PROMPT, PROMPT_ERROR, NUM_INPUT_TOKENS)
_DETOKENIZE = (DETOKENIZE_IDS, DETOKENIZE_STATE)

MODELS = {
    "llm": Contract(
        (*_PROMPT, PROMPT_ERROR, *OPTIONS),
        (Tensor("output_ids", "INT32", "New token ids.", dims=-1), *_DETOKENIZE, *ANSWER),
    ),
    "tokenizer": Contract((TEXT_INPUT,), _TOKENIZED),
    "chat_tokenizer": Contract((MESSAGES,), _TOKENIZED),
    "detokenizer": Contract(_DETOKENIZE, (TEXT_OUTPUT,)),
    "generate": Contract((TEXT_INPUT, *OPTIONS), (TEXT_OUTPUT, *ANSWER)),
    "chat": Contract((MESSAGES, *OPTIONS), (TEXT_OUTPUT, *ANSWER)),
}

_BY_NAME = {tensor.name: tensor for tensor in (*_PROMPT, *OPTIONS)}


def read(tensor: Tensor, array: Array) -> Any:
    """The checked content of a tensor as Python values of its own: `array` may be a view of shared
    memory that Triton takes back.

    Returns:
        int, float, bool or str where dims is 1; a list of them otherwise.

    Raises:
        RequestError: datatype, shape or a value is not allowed.
    """
    if array.dtype != NUMPY[tensor.datatype]:
        raise RequestError(f"has dtype {array.dtype}; allowed: {tensor.datatype}", tensor.name)
    if array.ndim != 1 or tensor.dims not in (-1, array.size):
        allowed = "[N]" if tensor.dims < 0 else f"[{tensor.dims}]"
        raise RequestError(f"has shape {list(array.shape)}; allowed: {allowed}", tensor.name)
    values = array.tolist()
    if tensor.datatype == "STRING":
        values = [_text(value, tensor.name) for value in values]
    elif tensor.datatype == "FP32" and not np.isfinite(array).all():
        broken = array[~np.isfinite(array)].tolist()
        raise RequestError(f"{broken[0]} is not a finite number", tensor.name)
    return values[0] if tensor.dims == 1 else values


def read_request(tensors: Mapping[str, Array]) -> dict[str, Any]:
    """Checked values of the `llm` model's inputs, by name.

    Raises:
        RequestError: an input is unknown, or not allowed as it is.
    """
    values = {}
    for name, array in tensors.items():
        tensor = _BY_NAME.get(name)
        if tensor is None:
            raise RequestError(f"is not an input{did_you_mean(name, _BY_NAME)}", name)
        values[name] = read(tensor, array)
    return values


def _text(value: object, name: str) -> str:
    if not isinstance(value, bytes):
        raise RequestError("holds something that is not bytes", name)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"is not valid UTF-8 (at byte {error.start})", name) from None

"""Table of all models' tensors: for parsing, error messages, the reference page, and the test of
the config.pbtxt files. The tensors of options are derived from the table of options.

Independent of Triton's Python API: a tensor is a name and a numpy array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.errors import RequestError, did_you_mean
from inflight.sampling.options import Datatype, OptionField
from inflight.triton import request_options

Array = npt.NDArray[Any]

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
        meaning: for the reference page.
        required: whether the model needs it. Inputs of the tokenizers are nevertheless optional for
            Triton: an ensemble whose first step lacks its only input ends with an empty success,
            while the step itself can report the missing input.
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


def tensors_of(field: OptionField) -> list[Tensor]:
    """The tensors of an option: itself, its aliases, or its parts."""
    dims = -1 if field.is_list else 1
    return [
        Tensor(
            name,
            datatype,
            f"Another name of {field.name}."
            if name in field.option.aliases
            else field.option.meaning,
            dims,
        )
        for name, datatype in field.tensors
    ]


OPTIONS = tuple(tensor for field in request_options.OPTIONS for tensor in tensors_of(field))

NUM_INPUT_TOKENS = Tensor("num_input_tokens", "UINT32", "Tokens of the prompt.")

# Part of every response.
ANSWER = (
    Tensor("index", "UINT32", "Index of the output that each other element belongs to.", dims=-1),
    Tensor("finish_reason", "STRING", "stop, length or cancelled; empty until the end.", dims=-1),
    NUM_INPUT_TOKENS,
    Tensor(
        "num_output_tokens",
        "UINT32",
        "Tokens of this response; a stream's sum is the total.",
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
        "A JSON list with {id: {logprob, rank, decoded_token}} for each new token, itself first; "
        "empty unless num_logprobs is set.",
        dims=-1,
    ),
    Tensor(
        "prompt_logprobs",
        "STRING",
        "The same for each prompt token, null for the first; empty unless num_prompt_logprobs or "
        "echo is set. Streamed in parts, the last one with the first output token.",
    ),
    Tensor(
        "draft_stats",
        "STRING",
        "At the end of an output with drafts: JSON of num_drafted, num_accepted, num_steps and "
        "tokens_per_step. With return_timing, also of timing, whether there were drafts or not, "
        "and of the stop_word that ended the output, if one did.",
        dims=-1,
    ),
)

TEXT_INPUT = Tensor("text_input", "STRING", "The prompt.", required=True)
PROMPT_TOKEN_IDS = Tensor(
    "prompt_token_ids", "INT32", "The prompt as token ids, instead of text_input.", dims=-1
)
ADD_SPECIAL_TOKENS = Tensor(
    "add_special_tokens",
    "BOOL",
    "Whether the model's special tokens, such as BOS, are added to text_input; true by default.",
)
MESSAGES = Tensor(
    "messages",
    "STRING",
    "A chat as a JSON list of OpenAI's message objects: content, tool_calls, tool_call_id, name, "
    "reasoning_content.",
    required=True,
)
TOOLS = Tensor("tools", "STRING", "Tools for the chat template: a JSON list of OpenAI's objects.")
CHAT_TEMPLATE_KWARGS = Tensor(
    "chat_template_kwargs",
    "STRING",
    'Further variables of the chat template: a JSON object, such as {"enable_thinking": false}.',
)
ADD_GENERATION_PROMPT = Tensor(
    "add_generation_prompt",
    "BOOL",
    "Whether the prompt ends with the start of the assistant's turn; true by default, unless "
    "continue_final_message is.",
)
CONTINUE_FINAL_MESSAGE = Tensor(
    "continue_final_message",
    "BOOL",
    "Whether the prompt ends with the text of the last message, which the output continues; false "
    "by default.",
)
TEXT_OUTPUT = Tensor("text_output", "STRING", "New text: valid UTF-8, always.", dims=-1)

INPUT_IDS = Tensor("input_ids", "INT32", "Token ids of the prompt.", dims=-1, required=True)
PROMPT_TENSOR = Tensor(
    "prompt_tensor",
    "STRING",
    "Set only by the tokenizers: the tensor that the prompt came from. It also means that a "
    "detokenizer follows, which acknowledges deliveries.",
)
PROMPT_ERROR = Tensor(
    "prompt_error",
    "STRING",
    "Set only by the tokenizers, instead of a prompt that they reject: why, as JSON of kind and "
    "message. The model llm answers the request with that error.",
)
DESCRIBE = Tensor(
    "describe", "BOOL", "True asks for the description instead of token ids; false by default."
)
DESCRIPTION = Tensor(
    "description",
    "STRING",
    "With describe: a JSON object of model (its name for clients), max_model_len, vocab_size, "
    "bos_token, eos_token, chat_template, tool_chat_template (for chats with tools, if it is "
    "another one), and special_tokens, a list of texts. null is what the model does not have.",
)
DETOKENIZE_IDS = Tensor(
    "detokenize_ids",
    "INT32",
    "A window of ids, then the new ones. A special token whose text is kept has 2^31 subtracted.",
    dims=-1,
)
DETOKENIZE_STATE = Tensor(
    "detokenize_state",
    "INT64",
    "For each output: number of ids, length of the window, characters to trim, 1 at the end, "
    "request id, position. [n, 0, 0, 1, 0, 0] with n ids is a text by itself: request id 0 is no "
    "request.",
    dims=-1,
)
DETOKENIZE_STATE_SIZE = 6
"""Values per output."""
DETOKENIZE_ERROR = Tensor(
    "detokenize_error",
    "STRING",
    "Set only by the model llm, with no ids and no state, when a stream fails that has begun: why, "
    "as JSON of kind and message. The detokenizer answers with that error.",
)

_PROMPT = (INPUT_IDS, PROMPT_TENSOR)
_TOKENIZED = (*_PROMPT, PROMPT_ERROR, NUM_INPUT_TOKENS)
TEXT_PROMPT = (TEXT_INPUT, PROMPT_TOKEN_IDS, ADD_SPECIAL_TOKENS)
CHAT_PROMPT = (
    MESSAGES,
    TOOLS,
    CHAT_TEMPLATE_KWARGS,
    ADD_GENERATION_PROMPT,
    CONTINUE_FINAL_MESSAGE,
)
_DETOKENIZE = (DETOKENIZE_IDS, DETOKENIZE_STATE, DETOKENIZE_ERROR)

MODELS = {
    "llm": Contract(
        (*_PROMPT, PROMPT_ERROR, *OPTIONS),
        (Tensor("output_ids", "INT32", "New token ids.", dims=-1), *_DETOKENIZE, *ANSWER),
    ),
    "tokenizer": Contract((*TEXT_PROMPT, DESCRIBE), (*_TOKENIZED, DESCRIPTION)),
    "chat_tokenizer": Contract(CHAT_PROMPT, _TOKENIZED),
    "detokenizer": Contract(_DETOKENIZE, (TEXT_OUTPUT,)),
    "generate": Contract((*TEXT_PROMPT, *OPTIONS), (TEXT_OUTPUT, *ANSWER)),
    "chat": Contract((*CHAT_PROMPT, *OPTIONS), (TEXT_OUTPUT, *ANSWER)),
}

_BY_NAME = {tensor.name: tensor for tensor in (*_PROMPT, *OPTIONS)}


def read(tensor: Tensor, array: Array) -> Any:
    """The checked content of a tensor as Python values: copied, as `array` may be a view of shared
    memory that Triton reclaims.

    Returns:
        int, float, bool or str if dims is 1, otherwise a list of them.

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


def read_required(tensor: Tensor, inputs: Mapping[str, Array]) -> Any:
    """The value of a tensor. Raises RequestError: it is missing, or not allowed."""
    if tensor.name not in inputs:
        raise RequestError("is missing", tensor.name)
    return read(tensor, inputs[tensor.name])


def read_flag(name: str, inputs: Mapping[str, Array]) -> bool | None:
    """The value of a BOOL[1]; None if it is missing. Raises RequestError: not allowed."""
    if name not in inputs:
        return None
    return bool(read(Tensor(name, "BOOL", ""), inputs[name]))


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
        raise RequestError("has an element that is not bytes", name)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"is not valid UTF-8 (at byte {error.start})", name) from None

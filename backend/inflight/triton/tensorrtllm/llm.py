"""The model `tensorrt_llm` of TensorRT-LLM's backend: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import triton_python_backend_utils as pb_utils
from inflight.core.request import TokenEvent
from inflight.errors import RequestError
from inflight.ipc.metrics.usage import ACCOUNT
from inflight.text.detokenize import Detokenizer
from inflight.triton import contract, protocol
from inflight.triton.contract import Array, Tensor
from inflight.triton.dialects import request_parameters
from inflight.triton.engine_front import Call, EngineFront
from inflight.triton.sibling import load_tokenizer
from inflight.triton.tensorrtllm import options

_INPUT_IDS = Tensor("input_ids", "INT32", "Token ids of the prompt.", dims=-1, required=True)
_INPUT_LENGTHS = Tensor("input_lengths", "INT32", "How many of them count.")
_OUTPUT_LEN = Tensor("request_output_len", "INT32", "Maximum number of tokens.", required=True)
_BIAS = Tensor("embedding_bias", "FP32", "Bias of each token of the vocabulary.", dims=-1)
_STOP = "stop"
_WORD_LISTS = {"stop_words_list": "stop_words", "bad_words_list": "bad_words"}


class TensorrtLlmResponseBuilder:
    """One response for each output, or for all beams of a search.

    Args:
        generation: the request.
        pad_id: follows shorter beams.
    """

    def __init__(self, generation: protocol.Generation, pad_id: int) -> None:
        self._generation = generation
        self._pad_id = pad_id
        self._has_beams = generation.params.beam_width > 1
        self.num_responses = 1 if self._has_beams else generation.n

    def responses(
        self, events: list[TokenEvent], request_ids: list[int]
    ) -> list[Mapping[str, Array]]:
        parts = self._generation.answer(
            [protocol.OutputDelta(request_ids.index(one.request_id), one, []) for one in events]
        )
        if self._has_beams:
            return [self._response(parts)]
        return [self._response([part]) for part in parts]

    def _response(self, parts: list[protocol.OutputDelta]) -> dict[str, Array]:
        prompt = self._generation.prompt_ids if self._generation.echo else []
        rows = [prompt + part.event.token_ids for part in parts]
        lengths = [len(row) for row in rows]
        ids = np.full((1, len(rows), max(lengths)), self._pad_id, np.int32)
        for place, row in enumerate(rows):
            ids[0, place, : len(row)] = row
        found = {
            "output_ids": ids,
            "sequence_length": np.array([lengths], np.int32),
            "batch_index": np.zeros((1, 1), np.int32),
            "sequence_index": np.array([[parts[0].output]], np.int32),
        }
        if self._generation.params.num_logprobs is not None:
            arrays = protocol.outputs(parts, len(self._generation.prompt_ids))
            texts = [text.decode() for text in arrays["logprobs"]]
            found |= options.log_probs(texts, arrays["cumulative_logprob"].tolist())
        return found


class TensorrtLlmFront(EngineFront):
    """A model with the role `tensorrt_llm`.

    Args:
        parameters: of config.pbtxt: `exclude_input_in_output`, the default of that input, and those
            of `EngineFront`.
    """

    def __init__(self, directory: Path, parameters: Mapping[str, str]) -> None:
        self._excludes_input = options.excludes_input(parameters)
        self._detokenizer = Detokenizer(load_tokenizer(directory))
        super().__init__(directory, parameters)

    def _accept(self, request: Any, sender: Any, requested_outputs: frozenset[str]) -> None:
        stop = pb_utils.get_input_tensor_by_name(request, _STOP)
        if stop is None or not stop.as_numpy().any():
            return super()._accept(request, sender, requested_outputs)
        parameters = request_parameters.decode(request.parameters())
        self.cancel_named(request.request_id(), str(parameters.get(ACCOUNT, "")))
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        sender.send(pb_utils.InferenceResponse([]), flags=final)
        return None

    def read(
        self, inputs: Mapping[str, Array], parameters: dict[str, Any], limits: protocol.Limits
    ) -> Call:
        given = options.unbatched(inputs)
        contract.read_required(_OUTPUT_LEN, given)
        passed = options.options(given)
        stream = contract.read_flag("streaming", given)
        passed[options.EXCLUDE_INPUT] = options.excluded(given, stream, self._excludes_input)
        if not self._is_decoupled:
            passed["stream"] = np.array([False])
        passed[_INPUT_IDS.name] = _prompt(given)
        for name, ours in _WORD_LISTS.items():
            if name in given:
                passed[ours] = self._words(name, given[name])
        if _BIAS.name in given:
            passed |= _biases(contract.read(_BIAS, given[_BIAS.name]), limits.vocab_size)
        known = {
            name: value for name, value in parameters.items() if name in request_parameters.NAMES
        }
        with protocol.client_names(options.client_names(given)):
            generation = protocol.parse(passed, known, limits)
        pad_id = int(given["pad_id"][0]) if "pad_id" in given else 0
        return Call(generation, TensorrtLlmResponseBuilder(generation, pad_id))

    def _words(self, name: str, array: Array) -> Array:
        """The texts of a list of token sequences: ids in row 0, and the end of each in row 1,
        followed by -1."""
        if array.ndim != 2 or array.shape[0] != 2 or array.dtype != np.int32:
            raise RequestError(
                f"has shape {[1, *array.shape]}, dtype {array.dtype}; allowed: [1, 2, N], INT32",
                name,
            )
        ids, ends = array.tolist()
        words, begin = [], 0
        for end in ends:
            if end < 0:
                break
            if not begin < end <= len(ids):
                raise RequestError(
                    f"row 1 has {end} after {begin}; allowed: ascending, up to {len(ids)}", name
                )
            word = self._detokenizer.decode(ids[begin:end])
            if not word or "\ufffd" in word:
                raise RequestError(
                    f"the tokens {ids[begin:end]} are not a text; allowed: tokens of whole "
                    "characters, and end_id for a special token",
                    name,
                )
            words.append(word.encode())
            begin = end
        return np.array(words, object)


def _prompt(given: Mapping[str, Array]) -> Array:
    ids: list[int] = contract.read_required(_INPUT_IDS, given)
    if _INPUT_LENGTHS.name in given:
        length = contract.read(_INPUT_LENGTHS, given[_INPUT_LENGTHS.name])
        if not 0 <= length <= len(ids):
            raise RequestError(
                f"{length} is not allowed; allowed: 0 to {len(ids)}", "input_lengths"
            )
        ids = ids[:length]
    return np.array(ids, np.int32)


def _biases(biases: list[float], vocab_size: int) -> dict[str, Array]:
    if len(biases) > vocab_size:
        raise RequestError(
            f"has {len(biases)} values; allowed: one for each of {vocab_size} tokens", _BIAS.name
        )
    return options.logit_biases({id_: bias for id_, bias in enumerate(biases) if bias})

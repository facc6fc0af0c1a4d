"""The tokenizers' sandbox: `python -m inflight.text.encoding_server`."""

from __future__ import annotations

import msgspec
import tokenizers

from inflight.errors import RequestError
from inflight.sandbox.server import serve
from inflight.sandbox.worker import Work
from inflight.text.encoder import Encoder
from inflight.text.encoding_sandbox import MAX_IDS, Ids, Pieces, Refusal, Source, Text


def _prepare(setup: bytes) -> Work:
    source = msgspec.msgpack.decode(setup, type=Source)
    encoder = Encoder(tokenizers.Tokenizer.from_str(source.text), source.markers)
    encoder.encode_pieces([], "")  # builds what all workers share

    def work(job: bytes) -> bytes:
        return msgspec.msgpack.encode(_encode(encoder, job))

    return work


def _encode(encoder: Encoder, frame: bytes) -> Ids | Refusal:
    job = msgspec.msgpack.decode(frame, type=Text | Pieces)
    try:
        if isinstance(job, Text):
            ids = encoder.encode(job.text, job.add_special_tokens, "")
        else:
            ids = encoder.encode_pieces(job.pieces, "")
    except RequestError as error:
        return Refusal(str(error))
    if len(ids) > MAX_IDS:
        return Refusal(f"the text has {len(ids)} tokens; allowed: {MAX_IDS}")
    return Ids(ids)


if __name__ == "__main__":
    serve(_prepare, keeps_workers=True)

"""The sandbox's process: `python -m inflight.structured.sandbox_process`.

It is set up with a vocabulary; a job is a guide, and the answer a verdict. Each guide gets a worker
of its own, with the library loaded and the vocabulary built.
"""

from __future__ import annotations

import random
import threading
import time

import llguidance
import msgspec

from inflight.core.output_constraint import StructuredOutput
from inflight.errors import RequestError
from inflight.sandbox.server import serve
from inflight.sandbox.worker import Work
from inflight.structured.grammar import (
    MAX_SOURCE_BYTES,
    Verdict,
    compile_source,
    first_line,
    source,
)
from inflight.structured.vocabulary import Vocabulary

MAX_STEP_S = 0.05
"""Limit for a mask, or for consuming a token. Generous, for busy machines: the library's own
limits, which count work instead of time, are hit long before."""

MAX_GRAMMAR_BYTES = 64 << 20
"""Memory that a compiled grammar may retain."""

# The engine's mask thread may have only 2 MiB of stack: what needs more must fail here.
_STACK_BYTES = 1 << 20
_WALKS = 2
_WALK_STEPS = 48
_WALKS_S = 0.25  # of processor time, all together


def examine(tokenizer: llguidance.LLTokenizer, constraint: StructuredOutput) -> Verdict:
    """Compile a guide and walk through it randomly. Call it where it may crash the process.

    The walks find what compiling does not: the library builds its automata lazily, so an expensive
    grammar may compile instantly.
    """
    try:
        constraint.check()
        text = source(constraint)
    except RequestError as error:
        return Verdict(refusal=str(error).removeprefix(f"{error.param}: "))
    except ValueError as error:
        return Verdict(refusal=first_line(str(error)))
    if len(text) > MAX_SOURCE_BYTES:
        return Verdict(
            refusal=f"too large: {len(text)} bytes once expanded; allowed: {MAX_SOURCE_BYTES}"
        )
    before = _anonymous_bytes()
    started = time.monotonic()
    matcher = compile_source(tokenizer, text)
    compile_s = time.monotonic() - started
    if matcher.is_error():
        return Verdict(refusal=first_line(matcher.get_error()))
    step_s = 0.0
    rng = random.Random(0)
    deadline = time.thread_time() + _WALKS_S
    for _ in range(_WALKS):
        slowest, problem = _walk(matcher.deep_copy(), rng, deadline)
        step_s = max(step_s, slowest)
        if problem:
            return Verdict(refusal=problem)
    if step_s > MAX_STEP_S:
        return Verdict(
            refusal=f"too complex: a step takes {step_s * 1e3:.0f} ms; "
            f"allowed: {MAX_STEP_S * 1e3:.0f} ms"
        )
    num_bytes = max(0, _anonymous_bytes() - before)
    if num_bytes > MAX_GRAMMAR_BYTES:
        return Verdict(
            refusal=f"too large: it holds {num_bytes >> 20} MiB of memory; "
            f"allowed: {MAX_GRAMMAR_BYTES >> 20} MiB"
        )
    return Verdict(source=text, compile_s=compile_s, step_s=step_s, num_bytes=num_bytes)


def _walk(matcher: llguidance.LLMatcher, rng: random.Random, deadline: float) -> tuple[float, str]:
    """The slowest step in seconds of CPU time, and the failure, if any."""
    slowest = 0.0
    for position in range(_WALK_STEPS):
        started = time.thread_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            where = f"after {position} tokens" if position else "from the start"
            why = first_line(matcher.get_error())
            stuck = why.startswith("NoExtension")
            return slowest, f"{'nothing can match it' if stuck else 'too complex'} {where}: {why}"
        computed = time.thread_time()
        matcher.consume_token(_pick(mask, rng))
        consumed = time.thread_time()
        slowest = max(slowest, computed - started, consumed - computed)
        if matcher.is_stopped() or consumed > deadline:
            break
    return slowest, ""


def _pick(mask: bytes, rng: random.Random) -> int:
    """One of the ids whose bits are set; there is one."""
    start = rng.randrange(len(mask))
    rest = mask[start:].lstrip(b"\0") or mask.lstrip(b"\0")
    bits = [bit for bit in range(8) if rest[0] >> bit & 1]
    return (len(mask) - len(rest)) * 8 + bits[rng.randrange(len(bits))]


def _anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _prepare(setup: bytes) -> Work:
    vocabulary = msgspec.msgpack.decode(setup, type=Vocabulary)
    tokenizer = vocabulary.llguidance_tokenizer()
    examine(tokenizer, StructuredOutput("json"))  # warm up

    def work(job: bytes) -> bytes:
        try:
            constraint = msgspec.msgpack.decode(job, type=StructuredOutput)
        except (msgspec.ValidationError, RequestError) as error:
            return msgspec.msgpack.encode(Verdict(refusal=str(error)))
        return msgspec.msgpack.encode(_examine_on_small_stack(tokenizer, constraint))

    return work


def _examine_on_small_stack(
    tokenizer: llguidance.LLTokenizer, constraint: StructuredOutput
) -> Verdict:
    """`examine` on a thread with the stack of the engine's.

    Raises:
        MemoryError: it does not fit into the worker's memory.
    """
    verdicts: list[Verdict | None] = []

    def run() -> None:
        try:
            verdicts.append(examine(tokenizer, constraint))
        except MemoryError:
            verdicts.append(None)
        except BaseException as error:  # a panic in Rust is one
            verdicts.append(Verdict(refusal=f"the compiler failed ({type(error).__name__})"))

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=run)
    try:
        thread.start()
    except RuntimeError:  # no memory for its stack
        raise MemoryError from None
    thread.join()
    verdict = verdicts[0]
    if verdict is None:
        raise MemoryError
    return verdict


if __name__ == "__main__":
    serve(_prepare, keeps_workers=False)

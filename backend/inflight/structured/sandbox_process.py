"""The sandbox's process: `python -m inflight.structured.sandbox_process`.

It reads a vocabulary, then guides, and answers each with a verdict. It forks for every guide: the
fork is warm (library loaded, vocabulary built), runs under its own limits, and contains any failure
(timeout, memory, stack overflow, panic). This process itself processes no guide, so it survives.

Frames on stdin and stdout: a length of four bytes, then MessagePack. It ends when stdin does.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import select
import signal
import threading
import time
from collections.abc import Callable

import llguidance
import msgspec

from inflight.core.output_constraint import StructuredOutput
from inflight.errors import RequestError
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

HEADER_BYTES = 4


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first frame to the process."""

    vocabulary: Vocabulary
    time_limit_s: float
    memory_limit: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The answer to Setup."""


def write_frame(fd: int, frame: msgspec.Struct | StructuredOutput) -> None:
    body = msgspec.msgpack.encode(frame)
    data = memoryview(len(body).to_bytes(HEADER_BYTES, "big") + body)
    while data:
        data = data[os.write(fd, data) :]


def _read_frame(fd: int) -> bytes | None:
    header = _read(fd, HEADER_BYTES)
    return None if header is None else _read(fd, int.from_bytes(header, "big"))


def _read(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


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


class _Trial:
    """A fork that examines one guide under limits."""

    def __init__(self, work: Callable[[], Verdict], time_limit_s: float, memory_limit: int) -> None:
        self._time_limit_s = time_limit_s
        self._memory_limit = memory_limit
        self._deadline = time.monotonic() + time_limit_s
        self._answer, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._limit()
                self._run(work, answer)
            finally:
                os._exit(1)
        os.close(answer)

    def _limit(self) -> None:
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        bound = used + self._memory_limit
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # In case the parent dies and cannot enforce the deadline.
        seconds = int(self._time_limit_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        # A crash may print untrusted text.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def _run(self, work: Callable[[], Verdict], answer: int) -> None:
        def examine_and_answer() -> None:
            try:
                verdict = work()
            except MemoryError:
                verdict = Verdict(refusal=self._too_large())
            except BaseException as error:  # a panic in Rust is one
                verdict = Verdict(refusal=f"the compiler failed ({type(error).__name__})")
            write_frame(answer, verdict)
            os._exit(0)

        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=examine_and_answer)
        thread.start()
        thread.join()

    def verdict(self) -> Verdict:
        """Wait for the end of the fork, one way or another."""
        data = b""
        try:
            while True:
                left = self._deadline - time.monotonic()
                if left <= 0 or not select.select([self._answer], [], [], left)[0]:
                    os.kill(self._pid, signal.SIGKILL)
                    return Verdict(
                        refusal=f"too complex: it does not compile within {self._time_limit_s:g} s"
                    )
                part = os.read(self._answer, 1 << 20)
                if not part:
                    break
                data += part
        finally:
            os.close(self._answer)
            _, status = os.waitpid(self._pid, 0)
        size = int.from_bytes(data[:HEADER_BYTES], "big")
        if len(data) > HEADER_BYTES and len(data) == HEADER_BYTES + size:
            return msgspec.msgpack.decode(data[HEADER_BYTES:], type=Verdict)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV:
            return Verdict(refusal="too deeply nested: it overflows the compiler's stack")
        return Verdict(refusal=self._too_large())

    def _too_large(self) -> str:
        return f"too large: it does not compile within {self._memory_limit >> 20} MiB of memory"


def main() -> None:
    # stdout carries frames only: redirect everything else that prints.
    stdin, stdout = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # Prefer this process as the OOM killer's victim.
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass
    frame = _read_frame(stdin)
    if frame is None:
        return
    setup = msgspec.msgpack.decode(frame, type=Setup)
    tokenizer = setup.vocabulary.llguidance_tokenizer()
    examine(tokenizer, StructuredOutput("json"))  # warm up
    gc.collect()
    gc.freeze()
    gc.disable()
    write_frame(stdout, Ready())
    while (frame := _read_frame(stdin)) is not None:
        try:
            constraint = msgspec.msgpack.decode(frame, type=StructuredOutput)
        except (msgspec.ValidationError, RequestError) as error:
            write_frame(stdout, Verdict(refusal=str(error)))
            continue

        def work(constraint: StructuredOutput = constraint) -> Verdict:
            return examine(tokenizer, constraint)

        write_frame(stdout, _Trial(work, setup.time_limit_s, setup.memory_limit).verdict())


if __name__ == "__main__":
    main()

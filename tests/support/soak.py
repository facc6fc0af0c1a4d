"""A mixed load on a supervised server, and what its processes hold before and after it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from kserve import RawInput, Refused, Stream, ask, generate, post, request, tensor, text
from supervised import Serving

CLIENTS = 8
SAMPLES = 40
WORDS = ("a lighthouse", "seven ducks", "the last train", "rain", "Ünïcödé", "🦆", "two\nlines")
OPTIONS: tuple[tuple[str, str, Any], ...] = (
    ("temperature", "FP32", 0.8),
    ("top_k", "INT32", 5),
    ("top_p", "FP32", 0.9),
    ("min_p", "FP32", 0.05),
    ("seed", "UINT64", 7),
    ("repetition_penalty", "FP32", 1.1),
    ("presence_penalty", "FP32", 0.5),
    ("ignore_eos", "BOOL", True),
    ("min_tokens", "INT32", 2),
    ("num_logprobs", "INT32", 3),
    ("stop_words", "BYTES", "zebra"),
)
BAD_INPUTS: tuple[tuple[RawInput, ...], ...] = (
    (text(""),),
    (text(b"\xff\xfe"),),
    (text("x"), tensor("top_k", "INT32", -7)),
    (text("x"), tensor("temperature", "FP32", float("nan"))),
    (text("x"), tensor("unknown", "INT32", 1)),
    (text("x"), tensor("max_tokens", "INT32", -2)),
    (text("word " * 20_000), tensor("max_tokens", "INT32", 4)),
)
BAD_BODIES = ("", "{", "[1]", '{"text_input": 5}', '{"text_input": "x", "top_k": -7}')


@dataclass(frozen=True)
class Usage:
    """What a process holds.

    Attributes:
        rss: bytes of memory.
        fds, threads: numbers.
    """

    rss: int
    fds: int
    threads: int


def usage(serving: Serving) -> dict[str, Usage]:
    """By the process's role and pid: one that is replaced is another one."""
    found = {}
    for process in [serving.process, *serving.children()]:
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            held = Usage(process.memory_info().rss, process.num_fds(), process.num_threads())
            words = process.cmdline()
            if words:  # for a moment after its exec, it has none
                found[f"{_role(words)} {process.pid}"] = held
    return found


def _role(words: list[str]) -> str:
    for word in words:
        if word.startswith("inflight."):
            return word.rpartition(".")[2]
    if any(word.startswith("triton_") for word in words):
        return "stub " + next((Path(one).parts[-3] for one in words if one.endswith(".py")), "")
    return Path(words[0]).name


def slope(points: list[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (Theil-Sen): robust against steps."""
    pairs = (((y2 - y1) / (x2 - x1)) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 > x1)
    return statistics.median(pairs)


class Load:
    """Requests of many kinds, a fifth of them cancelled; each must end as it should.

    Args:
        serving: the server.
        seed: of the requests.
    """

    def __init__(self, serving: Serving, seed: int = 0) -> None:
        self.num_done = 0
        self.done: Counter[str] = Counter()
        self._serving = serving
        self._seed = seed
        self._lock = threading.Lock()
        self._actions = {
            self.complete_grpc: 4,
            self.complete_http: 2,
            self.chat: 1,
            self.cancel_grpc: 1.2,
            self.cancel_http: 1,
            self.be_refused_grpc: 1,
            self.be_refused_http: 0.8,
        }

    @property
    def num_cancelled(self) -> int:
        return self.done["cancel_grpc"] + self.done["cancel_http"]

    def run(self, number: int) -> list[tuple[int, dict[str, Usage]]]:
        """Send so many requests; returns samples of (requests sent, usage)."""
        start, samples = self.num_done, []
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, one, start + number) for one in range(CLIENTS)]
            for sample in range(1, SAMPLES + 1):
                while self.num_done - start < number * sample / SAMPLES:
                    if any(one.done() and one.exception() for one in clients):
                        break
                    time.sleep(0.05)
                samples.append((self.num_done, usage(self._serving)))
            for one in clients:
                one.result()
        self._seed += CLIENTS
        return samples

    def _client(self, number: int, end: int) -> None:
        generator = random.Random(self._seed + number)
        while self.num_done < end:
            (action,) = generator.choices([*self._actions], [*self._actions.values()])
            action(generator)
            with self._lock:
                self.num_done += 1
                self.done[action.__name__] += 1

    def complete_grpc(self, generator: random.Random) -> None:
        inputs = [text(_prompt(generator)), tensor("max_tokens", "INT32", generator.randint(2, 24))]
        inputs += [tensor(*option) for option in generator.sample(OPTIONS, 3)]
        if generator.random() < 0.5:
            inputs.append(tensor("stream", "BOOL", True))
        answers = ask(self._serving.grpc, request("generate", *inputs))
        assert answers[-1]["finish_reason"] in ("stop", "length")

    def complete_http(self, generator: random.Random) -> None:
        prompt, max_tokens = _prompt(generator), generator.randint(1, 24)
        if generator.random() < 0.5:
            answer = generate(
                self._serving.http, "generate", text_input=prompt, max_tokens=max_tokens
            )
            assert answer["finish_reason"] in ("stop", "length")
        else:
            body = {"text_input": prompt, "max_tokens": max_tokens, "stream": True}
            status, events = post(self._serving.http, "generate", "generate_stream", body)
            assert status == 200 and "finish_reason" in events, events

    def chat(self, generator: random.Random) -> None:
        messages = json.dumps([{"role": "user", "content": _prompt(generator)}])
        body = {"messages": messages, "max_tokens": generator.randint(1, 16)}
        assert generate(self._serving.http, "chat", **body)["finish_reason"]

    def cancel_grpc(self, generator: random.Random) -> None:
        stream = Stream(
            self._serving.grpc,
            request(
                *("generate", text("Once upon a time"), tensor("stream", "BOOL", True)),
                *(tensor("ignore_eos", "BOOL", True), tensor("max_tokens", "INT32", 4000)),
            ),
        )
        for _, answer in zip(range(generator.randint(0, 5)), stream.call, strict=False):
            assert not answer.error_message, answer.error_message
        generator.choice([stream.cancel, stream.hang_up])()

    def cancel_http(self, generator: random.Random) -> None:
        connection = http.client.HTTPConnection(self._serving.http, timeout=60)
        body = {"text_input": "Once upon", "stream": True, "ignore_eos": True, "max_tokens": 4000}
        connection.request("POST", "/v2/models/generate/generate_stream", json.dumps(body).encode())
        for _ in range(generator.randint(0, 3)):
            connection.sock.recv(64)
        connection.close()

    def be_refused_grpc(self, generator: random.Random) -> None:
        try:
            ask(self._serving.grpc, request("generate", *generator.choice(BAD_INPUTS)))
        except Refused:
            return
        raise AssertionError("a bad input was accepted")

    def be_refused_http(self, generator: random.Random) -> None:
        status, answer = post(
            self._serving.http, "generate", "generate", generator.choice(BAD_BODIES)
        )
        assert status == 400 and "error" in answer, (status, answer)


def _prompt(generator: random.Random) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(1, 40)))

"""Models of a running server are loaded, replaced and unloaded under streams of others."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import stat
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import long_results
import small_checkpoint
from changing_models import (
    NUM_TOKENS,
    STEP_MS,
    STREAMS,
    Streams,
    change,
    check_footprint,
    footprint,
    states,
)
from failpoint import failpoint
from inflight.deploy import repository
from inflight.errors import ConfigError, InflightError
from inflight.ipc import control
from inflight.ipc.control import LoadModel, UnloadModel
from inflight.ipc.runtime_folder import folder_of
from kserve import Refused, Stream, ask, post, request, tensor, text
from supervised import Serving, serve, without_chat
from waiting import wait_until_ended

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# Each with two loads.
NUM_ROUNDS = 3
NUM_LONG_ROUNDS = 50
# As of a model on a GPU: an engine that starts needs the cores, and a step does not.
LONG_STEP_MS = 20
NUM_LONG_TOKENS = 100
# A load of one model may add so much to the 99th percentile of another's inter-token latency. Its
# processes compute for 5 s, which the streams share with them where there are no other cores: 1.25.
MAX_ITL_GROWTH = 1.2 if len(os.sched_getaffinity(0)) >= 4 else 1.5
QUIET_S = 2.0
ENGINE: dict[str, Any] = {"device": "echo", "num_threads": 1, "num_blocks": 256}


@contextlib.contextmanager
def serving_two(folder: Path, *arguments: str, step_ms: int = STEP_MS) -> Iterator[Serving]:
    """A server with the models `llm` and `two_llm`."""
    model = str(small_checkpoint.write(folder / "checkpoint"))
    repository.init(model, folder / "models", name="two", settings=ENGINE)
    with (
        failpoint("slow", step_ms),
        serve(folder, "echo", "--model-control", *arguments, prepare=without_chat) as serving,
    ):
        yield serving


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_two(tmp_path_factory.mktemp("control")) as found:
        yield found


@pytest.fixture(autouse=True)
def _both_are_loaded(serving: Serving) -> None:
    for name in ("llm", "two_llm"):
        if states(serving)[name].state != "ready":
            change(serving, LoadModel(name))


def answer(serving: Serving, ensemble: str) -> str:
    message = request(ensemble, text("The canary sings."), tensor("max_tokens", "INT32", 16))
    return str(ask(serving.grpc, message)[0]["text_output"])


def itl_p99_ms(streams: Streams) -> float:
    """Of the responses since the last call."""
    return round(statistics.quantiles(streams.take_gaps(), n=100)[-1] * 1e3, 2)


def come_and_go(
    serving: Serving, num_rounds: int, num_tokens: int = NUM_TOKENS
) -> list[dict[str, Any]]:
    """Unload, load and replace a model under streams of the other one; a row for each round."""
    streams = Streams(serving, "generate", num_tokens)
    rows: list[dict[str, Any]] = []
    try:
        streams.wait_until_ended(2 * STREAMS)
        streams.take_gaps()
        time.sleep(QUIET_S)
        quiet_ms = itl_p99_ms(streams)
        for number in range(1, num_rounds + 1):
            started = time.monotonic()
            (status,) = change(serving, UnloadModel("two_llm")).models
            assert status.state == "unloaded"
            unloaded = time.monotonic()
            (status,) = change(serving, LoadModel("two_llm")).models
            assert status.state == "ready"
            loaded = time.monotonic()
            answer(serving, "two_generate")
            change(serving, LoadModel("two_llm", {"max_num_seqs": 8 + number}))
            replaced = time.monotonic()
            answer(serving, "two_generate")
            assert streams.errors == []
            assert serving.health()[0] == 200
            rows.append(
                {
                    "round": number,
                    "unload_s": round(unloaded - started, 2),
                    "load_s": round(loaded - unloaded, 2),
                    "replace_s": round(replaced - loaded, 2),
                    "itl_p99_ms": itl_p99_ms(streams),
                    "quiet_itl_p99_ms": quiet_ms,
                    **footprint(serving),
                }
            )
    finally:
        streams.stop()
    assert streams.errors == []
    return rows


def test_models_come_and_go_under_streams_of_another(serving: Serving) -> None:
    rows = come_and_go(serving, NUM_ROUNDS)
    check_footprint(rows[1], rows[-1])


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(7200)
def test_a_hundred_loads_leave_nothing(tmp_path: Path) -> None:
    with serving_two(tmp_path, step_ms=LONG_STEP_MS) as server:
        rows = come_and_go(server, NUM_LONG_ROUNDS, NUM_LONG_TOKENS)
    long_results.write("model-control", "models that come and go under streams of another", rows)
    check_footprint(rows[1], rows[-1])
    growth = [row["itl_p99_ms"] / row["quiet_itl_p99_ms"] for row in rows]
    assert statistics.median(growth) < MAX_ITL_GROWTH, growth


@pytest.mark.parametrize(
    "ensemble", ["generate", pytest.param("two_generate", marks=pytest.mark.long)]
)
def test_a_model_is_replaced_under_its_own_streams(serving: Serving, ensemble: str) -> None:
    """They finish on the engine on which they began, and new ones begin on the other."""
    name = {"generate": "llm", "two_generate": "two_llm"}[ensemble]
    streams = Streams(serving, ensemble)
    try:
        for _ in range(2):
            streams.wait_until_ended(STREAMS)
            change(serving, LoadModel(name, {"max_num_seqs": 9}))
            streams.wait_until_ended(streams.num_ended + STREAMS)
    finally:
        streams.stop()
    assert streams.errors == []


def test_a_model_finishes_its_streams_when_it_is_unloaded(serving: Serving) -> None:
    # It takes longer than the unload to begin.
    num_tokens_wanted = 2 * NUM_TOKENS
    inputs = [tensor("stream", "BOOL", True), tensor("ignore_eos", "BOOL", True)]
    inputs.append(tensor("max_tokens", "INT32", num_tokens_wanted))
    busy = Stream(serving.grpc, request("two_generate", text("word " * 50), *inputs))
    num_tokens = busy.next()["num_output_tokens"]
    unloading = threading.Thread(target=change, args=(serving, UnloadModel("two_llm")))
    unloading.start()
    num_tokens += sum(response["num_output_tokens"] for response in busy)
    assert num_tokens == num_tokens_wanted
    unloading.join()
    with pytest.raises(Refused, match=r"unknown model|not found|no available versions"):
        answer(serving, "two_generate")
    status, body = post(serving.http, "two_generate", "generate", {"text_input": "x"})
    assert (status, "two_generate" in json.loads(body)["error"]) == (404, True)
    assert serving.health()[0] == 200
    assert answer(serving, "generate")


def test_a_version_that_cannot_load_leaves_the_former_one(serving: Serving) -> None:
    """Broken settings, a missing checkpoint, and a configuration that Triton refuses."""
    canary = answer(serving, "two_generate")
    model = serving.models / "two_llm"
    version = model / "2"
    version.mkdir()
    try:
        for engine, words in (
            ('{"model": ', "not valid JSON"),
            ('{"model": "nowhere.gguf", "device": "echo"}', "nowhere.gguf"),
        ):
            (version / "engine.json").write_text(engine)
            with pytest.raises(InflightError, match=words):
                change(serving, LoadModel("two_llm"))
            assert answer(serving, "two_generate") == canary
    finally:
        (version / "engine.json").unlink()
        version.rmdir()
    config = serving.models / "two_detokenizer" / "config.pbtxt"
    before = config.read_text()
    config.write_text(before.replace('"detokenizer"', '"detokeniser"'))
    try:
        with pytest.raises(InflightError, match=r"'detokeniser'; allowed: .* 'detokenizer'"):
            change(serving, LoadModel("two_llm"))
        assert answer(serving, "two_generate") == canary
    finally:
        config.write_text(before)
    assert states(serving)["two_llm"].state == "ready"
    assert serving.health()[0] == 200
    change(serving, LoadModel("two_llm"))
    assert answer(serving, "two_generate") == canary


def test_settings_are_overridden_until_the_next_load(serving: Serving) -> None:
    change(serving, LoadModel("two_llm", {"num_blocks": 77}))
    assert states(serving)["two_llm"].num_blocks == 77
    with pytest.raises(ConfigError, match=r"unknown key 'num_block'.*'num_blocks'"):
        change(serving, LoadModel("two_llm", {"num_block": 78}))
    with pytest.raises(ConfigError, match="model: cannot be set here"):
        change(serving, LoadModel("two_llm", {"model": "/etc/passwd"}))
    change(serving, LoadModel("two_llm"))
    assert states(serving)["two_llm"].num_blocks == ENGINE["num_blocks"]


def test_a_restart_of_tritonserver_loads_the_same_models(serving: Serving) -> None:
    change(serving, LoadModel("llm", {"num_blocks": 333}))
    change(serving, UnloadModel("two_llm"))
    with serving.restarting("tritonserver"):
        os.kill(serving.pid_of("tritonserver"), signal.SIGKILL)
    assert answer(serving, "generate")
    with pytest.raises(Refused):
        answer(serving, "two_generate")
    found = states(serving)
    assert (found["llm"].num_blocks, found["two_llm"].state) == (333, "unloaded")


def test_an_engine_that_has_replaced_another_is_restarted(serving: Serving) -> None:
    change(serving, LoadModel("two_llm", {"num_blocks": 99}))
    change(serving, LoadModel("two_llm", {"num_blocks": 100}))
    killed = []
    for child in serving.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = [Path(one).name for one in child.cmdline() if one.endswith(".sock")]
            if "-" in next(iter(sockets), ""):
                child.kill()
                killed.append(child)
    _, alive = psutil.wait_procs(killed, timeout=60)
    assert killed and not alive
    serving.wait_until(lambda: is_answered(serving, "two_generate"))
    serving.wait_until(lambda: serving.health()[0] == 200)
    assert states(serving)["two_llm"].num_blocks == 100


def is_answered(serving: Serving, ensemble: str) -> bool:
    try:
        return bool(answer(serving, ensemble))
    except Refused:
        return False


def test_only_this_user_controls_models(serving: Serving) -> None:
    path = folder_of(serving.process.pid) / control.SOCKET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    status, _ = post(serving.http, "../repository/models/llm", "unload", {})
    assert status in (400, 403, 404)
    assert states(serving)["llm"].state == "ready"


def test_a_selection_is_loaded_at_the_start(tmp_path: Path) -> None:
    with serving_two(tmp_path, "--load-model", "two_llm") as server:
        assert {name: one.state for name, one in states(server).items()} == {
            "llm": "unloaded",
            "two_llm": "ready",
        }
        assert answer(server, "two_generate")
        change(server, LoadModel("llm"))
        assert answer(server, "generate")


def begin(serving: Serving, message: control.Request) -> tuple[threading.Thread, list[str]]:
    """Make a change on a thread of its own; returns that and the errors, which come later."""
    errors: list[str] = []

    def run() -> None:
        try:
            change(serving, message)
        except InflightError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def begin_changing(serving: Serving, message: LoadModel) -> tuple[threading.Thread, list[str]]:
    """As `begin`; returns while the change is under way, which a busy machine may miss."""
    for _ in range(5):
        thread, errors = begin(serving, message)
        while thread.is_alive():
            if states(serving)[message.name].state in ("loading", "unloading"):
                return thread, errors
            time.sleep(0.05)
        assert errors == []
        change(serving, LoadModel(message.name))  # without its overrides
    raise AssertionError("no change was seen")


def test_tritonserver_is_killed_while_a_model_is_replaced(serving: Serving) -> None:
    """The change fails, and the restarted server has the models of before."""
    num_children = len(serving.children())
    num_blocks = states(serving)["two_llm"].num_blocks
    override = {"num_blocks": num_blocks + 1}
    thread, errors = begin_changing(serving, LoadModel("two_llm", override))
    os.kill(serving.pid_of("tritonserver"), signal.SIGKILL)
    thread.join(120)
    assert not thread.is_alive() and len(errors) == 1
    serving.wait_until(lambda: serving.health()[0] == 200)
    serving.wait_until(lambda: is_answered(serving, "two_generate"))
    assert answer(serving, "generate")
    assert states(serving)["two_llm"].num_blocks == num_blocks
    serving.wait_until(lambda: len(serving.children()) == num_children)


def test_a_server_stops_while_a_model_loads(tmp_path: Path) -> None:
    with serving_two(tmp_path, "--load-model", "llm") as server:
        thread, errors = begin_changing(server, LoadModel("two_llm"))
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        thread.join(60)
        assert not thread.is_alive() and len(errors) == 1
    wait_until_ended(children)


STORM_THREADS = 4
NUM_LONG_CHANGES = 50
# Of two changes of a model, the later one may find that the earlier one has unloaded it.
UNLOADED = re.compile(r"model \w+ is not loaded; loaded: ")


def storm(serving: Serving, names: list[str], num_changes: int) -> list[str]:
    """Loads, replacements and unloads of models from four threads; returns the errors other than
    that a model to unload is not loaded."""
    errors: list[str] = []

    def run(number: int) -> None:
        generator = random.Random(number)
        for place in range(num_changes):
            name = generator.choice(names)
            message: control.Request = LoadModel(name, {"max_num_seqs": generator.randint(8, 64)})
            if (number + place) % STORM_THREADS == 1:
                message = UnloadModel(name)
            try:
                change(serving, message)
            except InflightError as error:
                if not UNLOADED.match(str(error)):
                    errors.append(str(error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(STORM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def check_storm(serving: Serving, names: list[str], num_changes: int) -> None:
    """All models are loaded and answer after it, and nothing else is left."""
    for name in names:
        change(serving, LoadModel(name))  # a first replacement leaves the second engine's files
    before = footprint(serving)
    assert storm(serving, names, num_changes) == []
    for name in names:
        change(serving, LoadModel(name))
    assert {one.state for one in states(serving).values()} == {"ready"}
    assert answer(serving, "generate") == answer(serving, "two_generate") == "The canary sings."
    serving.wait_until(lambda: footprint(serving)["processes"] == before["processes"])
    check_footprint(before, footprint(serving))
    serving.wait_until(lambda: serving.health()[0] == 200)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_storm_of_changes_leaves_nothing(tmp_path: Path) -> None:
    with serving_two(tmp_path) as server:
        check_storm(server, ["two_llm", "llm"], NUM_LONG_CHANGES)

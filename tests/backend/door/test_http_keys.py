"""The HTTP door of a server with keys."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from http_door import BODY, GENERATE, GET, Running, a_door, ask, head, post, sized
from inflight.access.key import KeyLimits
from keys import KeyDesk, desk
from waiting import wait_until

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
ROUTES = (
    "/v2", "/v2/models/echo", "/v2/models/echo/config", "/v2/models/echo/ready",
    "/v2/models/echo/stats", "/v2/models/echo/versions/1/ready", "/v2/models/echo/generate",
    "/v2/models/echo/generate_stream", "/v2/models/echo/infer", "/v2/models/stats",
    "/v2/models/echo/versions/1/infer", "/v2/repository/index", "/v2/logging",
    "/v2/systemsharedmemory/status", "/v2/trace/setting", "/v2/repository/models/echo/load",
    "/metrics", "/", "/nothing", "/v2/health", "/v2/health/started",
)  # fmt: skip
# Of a health probe or of a route, as proxies and servers have understood them in different ways.
SPELLINGS = (
    "//v2/health/ready", "/v2//health/ready", "/v2/health/ready/", "/v2/health/ready/.",
    "/v2/health/%72eady", "/v2/health/ready%00", "/v2/health/ready;x", "/V2/health/ready",
    "/v2/health/ready/../../models/echo", "/v2/health/live/%2e%2e/%2e%2e/models/echo",
    "/v2/health/ready%2f..%2f..%2fmodels", "/v2/health\\ready", "/v2/health/ready%3f",
    "/v2/%6dodels/echo", "/v2/models/%2e%2e/logging", "//v2/models/echo", "/v2/models/echo;x",
)  # fmt: skip


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, keys: KeyDesk) -> Iterator[Running]:
    options = (*keys.options, "--metrics", "127.0.0.1:{triton}")
    with a_door(tmp_path_factory.mktemp("door"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def key(keys: KeyDesk) -> str:
    return keys.issue()


def audited(keys: KeyDesk) -> list[dict[str, Any]]:
    return [json.loads(line) for line in keys.audit.read_text().splitlines()]


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.parametrize("route", ROUTES)
def test_20_every_route_and_method_needs_a_key(door: Running, route: str) -> None:
    before = len(door.triton.bodies)
    for method in METHODS:
        status, headers, reply = ask(door, method, route, BODY)
        assert status == 401, (method, reply)
        assert headers["www-authenticate"] == 'Bearer realm="inflight"'
        assert method == "HEAD" or "no valid API key" in json.loads(reply)["error"]
    assert door.triton.bodies[before:] == []


@pytest.mark.parametrize("path", SPELLINGS)
def test_20_odd_spellings_of_paths_need_a_key(door: Running, path: str) -> None:
    reply = door.answer(head(start=GET.format(path)))
    assert reply.startswith(b"HTTP/1.1 401 "), reply


@pytest.mark.parametrize("host", ["x/?a=", "localhost/v2/health/ready?", "a@b", "x#", ""])
def test_20_odd_hosts_are_refused(door: Running, host: str) -> None:
    reply = door.answer(head(start=f"GET /v2 HTTP/1.1\r\nHost: {host}\r\n"))
    assert reply.startswith(b"HTTP/1.1 400 "), reply
    absolute = door.answer(head(start="GET http://x/v2/health/ready HTTP/1.1\r\nHost: x\r\n"))
    assert absolute.startswith(b"HTTP/1.1 400 "), absolute


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/health/ready?a=/v2"])
def test_probes_need_no_key(door: Running, path: str) -> None:
    assert ask(door, "GET", path)[0] == 200
    assert ask(door, "HEAD", path)[0] == 200
    assert ask(door, "POST", path, b"{}")[0] == 401


def test_a_key_opens_the_routes(door: Running, key: str) -> None:
    for headers in (bearer(key), {"authorization": f"bEaReR  {key}"}, {"X-Api-Key": key}):
        status, _, reply = ask(door, "POST", "/v2/models/echo/generate", BODY, **headers)
        assert status == 200, reply
    assert ask(door, "GET", "/v2/models/echo", **bearer(key))[0] == 200
    assert ask(door, "GET", "/nothing", **bearer(key))[0] == 404


def test_21_bad_credentials_are_refused(door: Running, key: str) -> None:
    wrong = key[:-1] + ("a" if key[-1] != "a" else "b")
    cases = [
        "", "Bearer", "Bearer ", f"Basic {key}", key, f"Bearer {wrong}", f"Bearer {key}x",
        f"Bearer {key[:-1]}", f"Bearer {key.upper()}", f"Bearer {key}, Bearer {key}",
        f"Bearer\t{key}", f"Bearer {key}\xe4", "Bearer " + "a" * 8000,
    ]  # fmt: skip
    for value in cases:
        reply = door.answer(sized(BODY, f"Authorization: {value}"))
        assert reply.startswith(b"HTTP/1.1 401 "), (value, reply)
        assert key.encode() not in reply


def test_21_two_credentials_are_refused(door: Running, key: str) -> None:
    good, bad = f"Authorization: Bearer {key}", "Authorization: Bearer inf-x"
    for lines in ([good, good], [good, bad], [good, f"X-Api-Key: {key}"], ["X-Api-Key: ", good]):
        reply = door.answer(sized(BODY, *lines))
        assert reply.startswith(b"HTTP/1.1 401 "), (lines, reply)


def test_a_body_without_a_key_is_not_read(door: Running) -> None:
    reply = door.raw(head("Content-Length: 1000000", "Expect: 100-continue"))
    assert reply.startswith(b"HTTP/1.1 401 ") and b"100 Continue" not in reply
    assert b"connection: close" in reply.lower()


def test_keys_are_in_no_log_and_failures_are_audited(keys: KeyDesk, door: Running) -> None:
    made, secret = keys.issue_key("logged", models=("echo",))
    # Refusals of the tests before may be as many as the audit log takes in a second.
    time.sleep(1.0)
    post(door, BODY, **bearer(secret))
    post(door, BODY, "other/generate", **bearer(secret))
    ask(door, "GET", "/v2/secret-path", Authorization=f"Bearer {secret}x")
    audit = keys.audit.read_text()
    assert secret not in audit and secret[4:20] not in audit
    # A refusal of another test's connection may be written between them.
    entries = audited(keys)
    (model,) = [one for one in entries if one.get("key") == made.id and one.get("reason")]
    unknown = [one for one in entries if one.get("reason") == "malformed"][-1]
    assert (model["event"], model["reason"]) == ("refused.model", "other")
    assert (model["key"], model["tenant"], model["door"]) == (made.id, "logged", "http")
    assert model["what"] == "POST /v2/models/other/generate"
    assert (unknown["event"], unknown["reason"]) == ("refused.unauthenticated", "malformed")
    assert unknown["peer"].startswith("127.0.0.1:")


def test_a_revoked_key_is_refused_within_a_second(keys: KeyDesk, door: Running) -> None:
    made, secret = keys.issue_key("short")
    assert post(door, BODY, **bearer(secret))[0] == 200
    keys.revoke(made)
    assert post(door, BODY, **bearer(secret))[0] == 401


def test_a_broken_keys_file_leaves_the_keys(keys: KeyDesk, door: Running, key: str) -> None:
    content = keys.path.read_bytes()
    try:
        keys.path.write_text('{"keys": [')
        time.sleep(0.4)
        assert post(door, BODY, **bearer(key))[0] == 200
    finally:
        keys.path.write_bytes(content)


def test_other_models_are_unknown_to_a_key(keys: KeyDesk, door: Running) -> None:
    secret = keys.issue(models=("echo",))
    before = len(door.triton.bodies)
    for route in ("generate", "generate_stream", "infer"):
        status, text = post(door, BODY, f"other/{route}", **bearer(secret))
        assert (status, "allowed: echo" in text) == (404, True)
    for path in ("", "/config", "/ready", "/stats", "/versions/1/config"):
        assert ask(door, "GET", f"/v2/models/other{path}", **bearer(secret))[0] == 404
    assert ask(door, "GET", "/v2/models/stats", **bearer(secret))[0] == 404
    assert door.triton.bodies[before:] == []
    assert post(door, BODY, **bearer(secret))[0] == 200


def test_a_key_allows_all_versions_of_its_models(keys: KeyDesk, door: Running) -> None:
    door.versions = {"echo": [1, 2], "other": [3]}
    door.set(is_ready=True)
    try:
        secret = keys.issue(models=("echo",))
        for path, upstream in (
            ("echo/generate", "echo@2/generate"),
            ("echo/versions/1/generate", "echo@1/versions/1/generate"),
        ):
            assert post(door, BODY, path, **bearer(secret))[0] == 200
            assert door.triton.bodies[-1][0] == f"/v2/models/{upstream}"
        before = len(door.triton.bodies)
        status, text = post(door, BODY, "echo/versions/3/generate", **bearer(secret))
        assert (status, "no version 3; allowed: 1, 2" in text) == (404, True)
        status, text = post(door, BODY, "other/versions/9/generate", **bearer(secret))
        assert (status, "allowed: echo" in text) == (404, True)
        assert ask(door, "GET", "/v2/models/other/versions/9", **bearer(secret))[0] == 404
        assert door.triton.bodies[before:] == []
        index = json.loads(ask(door, "POST", "/v2/repository/index", **bearer(secret))[2])
        assert {one["name"] for one in index} <= {"echo"}
    finally:
        door.versions = {}
        door.set(is_ready=True)


def test_the_account_is_the_keys_whatever_the_client_sends(keys: KeyDesk, door: Running) -> None:
    made, secret = keys.issue_key("acme")
    headers = {**bearer(secret), "X-Tenant": "other", "inflight_account": "other/1"}
    assert post(door, BODY, **headers)[0] == 200
    sent = json.loads(door.triton.bodies[-1][1])
    assert sent == {"text_input": "x", "inflight_account": f"acme/{made.id}"}
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    assert post(door, {"inputs": [tensor]}, "echo/infer", **headers)[0] == 200
    sent = json.loads(door.triton.bodies[-1][1])
    assert sent["parameters"].pop("inflight_ticket")
    assert sent["parameters"] == {"inflight_account": f"acme/{made.id}"}
    mine = {"inflight_account": "other/1"}
    for body, route in (
        ({"text_input": "x", **mine}, "generate"),
        ({"text_input": "x", "parameters": mine}, "generate"),
        ({"inputs": [tensor], "parameters": mine}, "infer"),
    ):
        status, text = post(door, body, f"echo/{route}", **bearer(secret))
        assert status == 400 and "reserved for the server" in text


def test_metrics_are_for_admins(keys: KeyDesk, door: Running, key: str) -> None:
    before = len(door.triton.bodies)
    status, _, reply = ask(door, "GET", "/metrics", **bearer(key))
    assert (status, "allowed: an admin's" in reply.decode()) == (403, True)
    assert door.triton.bodies[before:] == []
    assert audited(keys)[-1]["event"] == "refused.role"
    post(door, BODY, **bearer(keys.issue("measured")))
    before = len(door.triton.bodies)
    admin = bearer(keys.issue(role="admin"))
    status, _, reply = ask(door, "GET", "/metrics", **admin)
    assert status == 200
    assert 'inflight_tenant_requests_total{tenant="measured"} 1.0' in reply.decode()
    assert door.triton.bodies[before:] == [("/metrics", b"")]


def test_requests_over_the_limit_get_429(keys: KeyDesk, door: Running) -> None:
    made, secret = keys.issue_key(limits=KeyLimits(requests_per_minute=3))
    replies = [
        ask(door, "POST", "/v2/models/echo/generate", BODY, **bearer(secret)) for _ in range(5)
    ]
    assert [status for status, _, _ in replies] == [200] * 3 + [429] * 2
    _, headers, reply = replies[-1]
    assert 1 <= int(headers["retry-after"]) <= 60
    assert "requests_per_minute: the key has reached its limit of 3; retry in" in str(reply)
    assert audited(keys)[-1].items() >= {"reason": "requests_per_minute", "key": made.id}.items()
    assert ask(door, "GET", "/v2/models/echo", **bearer(secret))[0] == 200  # no inference


def test_concurrent_requests_over_the_limit_get_429(keys: KeyDesk, door: Running) -> None:
    secret = keys.issue(limits=KeyLimits(concurrent_requests=2))
    with hold(door, secret, "first"), hold(door, secret, "second"):
        status, text = post(door, BODY, **bearer(secret))
        assert status == 429 and "concurrent_requests: the key has reached its limit of 2" in text
    wait_until(lambda: post(door, BODY, **bearer(secret))[0] == 200)


def slow(secret: str, prompt: str) -> bytes:
    """A request without an end."""
    body = b'{"text_input":"%s"}' % prompt.encode()
    lines = (f"Authorization: Bearer {secret}", f"Content-Length: {len(body)}")
    return head(*lines, start=GENERATE.replace("echo", "slow")) + body


def hold(door: Running, secret: str, prompt: str) -> socket.socket:
    """A connection with a request that runs, once the key's limit allows it."""
    body = b'{"text_input":"%s"' % prompt.encode()

    def runs() -> bool:
        return any(sent.startswith(body) for _, sent in door.triton.bodies)

    def begin() -> socket.socket | None:
        sock = door.connect()
        sock.sendall(slow(secret, prompt))
        wait_until(lambda: runs() or select.select([sock], [], [], 0)[0])
        if runs():
            return sock
        sock.close()  # refused
        return None

    found = wait_until(begin)
    assert found is not None
    return found


def test_a_stream_counts_until_its_end(keys: KeyDesk, door: Running) -> None:
    secret = keys.issue(limits=KeyLimits(concurrent_requests=1))
    for _ in range(5):
        assert post(door, BODY, "stream/generate_stream", **bearer(secret))[0] == 200
    assert post(door, b"no json", **bearer(secret))[0] == 400
    assert post(door, BODY, **bearer(secret))[0] == 200


def test_without_an_accountant_requests_are_503(tmp_path: Path) -> None:
    with desk(tmp_path / "keys") as keys, a_door(tmp_path, *keys.options) as door:
        secret = keys.issue(limits=KeyLimits(requests_per_minute=100))
        assert post(door, BODY, **bearer(secret))[0] == 200
        assert keys.process is not None
        keys.process.kill()
        keys.process.wait()
        status, headers, _ = ask(door, "POST", "/v2/models/echo/generate", BODY, **bearer(secret))
        assert (status, headers["retry-after"]) == (503, "1")
        assert ask(door, "GET", "/v2/health/ready")[0] == 200
        keys.start_again()
        assert post(door, BODY, **bearer(secret))[0] == 200


def test_a_lost_client_is_not_counted_for_ever(keys: KeyDesk, door: Running) -> None:
    secret = keys.issue(limits=KeyLimits(concurrent_requests=4))

    def come_and_go() -> None:
        with door.connect() as connection:
            connection.sendall(slow(secret, "lost"))
            select.select([connection], [], [], 0.02)

    threads = [threading.Thread(target=come_and_go) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with contextlib.ExitStack() as held:
        for number in range(4):
            held.enter_context(hold(door, secret, f"holder {number}"))
        assert post(door, BODY, **bearer(secret))[0] == 429
    wait_until(lambda: post(door, BODY, **bearer(secret))[0] == 200)


def test_a_door_does_not_start_with_a_broken_keys_file(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("[]")
    options = ("--keys", str(tmp_path / "keys.json"), "--accounts", str(tmp_path / "no.sock"))
    with pytest.raises(OSError), a_door(tmp_path, *options) as door:
        assert door.process.poll() == 1
        door.connect()

"""With --log-format json every record of ours is an object, whichever process wrote it."""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path

import pytest

from supervised import serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SECRET = "The password is xyzzy."


def test_the_records_of_all_processes_are_json_without_prompts(tmp_path: Path) -> None:
    with serve(tmp_path, "echo", "--grpc-guard", "--log-format", "json") as server:
        connection = http.client.HTTPConnection(server.http, timeout=60)
        body = json.dumps({"text_input": SECRET, "max_tokens": 4})
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v2/models/generate/generate", body, headers)
        assert connection.getresponse().status == 200
        connection.close()
        os.kill(server.pid_of("engine"), signal.SIGKILL)
        server.wait_until(lambda: "serves again" in server.log.read_text())
    lines = server.log.read_text(errors="replace").splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, records))
    loggers = {record["logger"] for record in records}
    assert {"inflight.engine", "inflight.supervisor"} <= loggers
    assert not [line for line in lines if " INFO inflight" in line or " supervisor:" in line]
    assert "xyzzy" not in "\n".join(lines)

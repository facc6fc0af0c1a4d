"""The keys file."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from inflight.access import keys_file
from inflight.access.key import KeyLimits, issue
from inflight.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def test_what_is_added_is_read(path: Path) -> None:
    first, _ = issue("acme", role="admin", expires_in_s=60, models=("chat",))
    second, _ = issue("other", limits=KeyLimits(requests_per_minute=5))
    keys_file.add(path, first)
    keys_file.add(path, second)
    assert keys_file.read(path) == [first, second]


def test_the_file_is_private_and_without_secrets(path: Path) -> None:
    key, secret = issue("acme")
    keys_file.add(path, key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert secret not in path.read_text()
    assert secret.removeprefix("inf-") not in path.read_text()


def test_a_revoked_key_is_gone(path: Path) -> None:
    first, second = issue("acme")[0], issue("acme")[0]
    keys_file.add(path, first)
    keys_file.add(path, second)
    assert keys_file.revoke(path, first.id) == first
    assert keys_file.read(path) == [second]


def test_an_unknown_id_is_an_error_that_names_it(path: Path) -> None:
    keys_file.add(path, issue("acme")[0])
    with pytest.raises(ConfigError, match="no key 'abc'"):
        keys_file.revoke(path, "abc")


def test_a_missing_file_says_how_to_create_it(path: Path) -> None:
    with pytest.raises(ConfigError, match="inflight key create"):
        keys_file.read(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"keys": 5}',
        '{"keys": [], "x": 1}',
        '{"keys": [{"sha256": "ab", "tenant": "a", "created": 1}]}',
    ],
)
def test_a_malformed_file_is_an_error(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a keys file"):
        keys_file.read(path)


def test_values_out_of_bounds_are_errors(path: Path) -> None:
    keys_file.add(path, issue("acme")[0])
    stored = json.loads(path.read_text())
    wrong = ({"tenant": "a/b"}, {"role": "root"}, {"limits": {"requests_per_minute": 0}}, {"x": 1})
    for change in wrong:
        path.write_text(json.dumps({"keys": [stored["keys"][0] | change]}))
        with pytest.raises(ConfigError, match="is not a keys file"):
            keys_file.read(path)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(path: Path, mode: int) -> None:
    keys_file.add(path, issue("acme")[0])
    path.chmod(mode)
    with pytest.raises(ConfigError, match="other users may write it"):
        keys_file.read(path)


def test_changes_at_once_are_all_kept(path: Path) -> None:
    keys = [issue("acme")[0] for _ in range(16)]
    threads = [threading.Thread(target=keys_file.add, args=(path, key)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.id for key in keys_file.read(path)} == {key.id for key in keys}

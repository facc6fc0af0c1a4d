"""Calls of other threads are made between two polls of the main one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from inflight.errors import ConfigError, EngineError
from inflight.supervision.models.main_thread import MainThread


def test_a_call_runs_on_the_main_thread_and_returns_its_result() -> None:
    main = MainThread()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(main.run, threading.get_ident)
        while not found.done():
            main.make_calls()
    assert found.result() == threading.get_ident()


def test_an_error_is_that_of_the_caller() -> None:
    main = MainThread()

    def fail() -> None:
        raise ConfigError("no")

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(main.run, fail)
        while not found.done():
            main.make_calls()
    with pytest.raises(ConfigError, match=r"^no$"):
        found.result()


def test_calls_are_refused_when_the_server_stops() -> None:
    main = MainThread()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(main.run, int)
        while not waiting.done():
            main.close()
        later = pool.submit(main.run, int)
    for found in (waiting, later):
        with pytest.raises(EngineError, match="the server is stopping"):
            found.result()

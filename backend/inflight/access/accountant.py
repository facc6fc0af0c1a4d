"""The process that counts what keys use: `python -m inflight.access.accountant`.

The limits of a key hold for all doors and their workers together, so one process counts. A request
in flight belongs to the connection of its door: if that process dies, its requests are over.
SIGTERM ends it; what it has counted for limits is lost, and what it has recorded is written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import Counter
from pathlib import Path

import msgspec
from prometheus_client import disable_created_metrics

from inflight import log
from inflight.access.accounts import Accounts
from inflight.access.ledger import Ledger
from inflight.access.messages import Begin, End, Metrics, ReadMetrics, to_line
from inflight.errors import ConfigError
from inflight.ipc.heartbeat import beat_from_loop
from inflight.ipc.metrics import usage
from inflight.ipc.processes import end_with
from inflight.ipc.sockets import private_socket

FLUSH_S = 1.0
MAX_LINE = 4096
MAX_DATAGRAM = 1 << 16

logger = logging.getLogger(__name__)


class Accountant:
    """Serves the doors and takes the fronts' reports."""

    def __init__(self, ledger: Ledger) -> None:
        self._accounts = Accounts(ledger)
        self._ledger = ledger
        self._decoder = msgspec.json.Decoder(Begin | End | ReadMetrics)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a door."""
        in_flight: Counter[str] = Counter()
        try:
            while line := await reader.readline():
                message = self._decoder.decode(line)
                if isinstance(message, End):
                    if in_flight[message.account] > 0:
                        in_flight[message.account] -= 1
                        self._accounts.end(message.account)
                    continue
                if isinstance(message, ReadMetrics):
                    writer.write(to_line(Metrics(self._accounts.metrics.text())))
                    continue
                verdict = await self._accounts.begin(message.account, message.limits)
                if not verdict.limit:
                    in_flight[message.account] += 1
                writer.write(to_line(verdict))
        except asyncio.CancelledError:
            pass  # this process ends; raised, asyncio would log it
        except (msgspec.DecodeError, ValueError, OSError) as error:
            logger.error("a door's connection ends: %s", error)
        finally:
            for account, count in in_flight.items():
                if count > 0:
                    self._accounts.end(account, count)
            writer.close()

    async def take_reports(self, receiver: socket.socket) -> None:
        """The fronts' counts of tokens, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            data = await loop.sock_recv(receiver, MAX_DATAGRAM)
            try:
                usages = usage.decode(data)
            except msgspec.DecodeError as error:
                logger.error("a report of usage is malformed: %s", error)
                continue
            for one in usages:
                await self._accounts.used(one)

    async def flush(self) -> None:
        """Write the ledger once a second, for ever."""
        while True:
            await asyncio.sleep(FLUSH_S)
            with contextlib.suppress(RuntimeError):  # no further thread: it is written later
                await asyncio.to_thread(self._ledger.flush)


async def run(options: argparse.Namespace) -> None:
    """Serve until SIGTERM. Raises ConfigError."""
    ledger = Ledger(options.ledger)
    accountant = Accountant(ledger)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tasks = [asyncio.create_task(accountant.flush())]
    if options.heartbeat is not None:
        tasks.append(asyncio.create_task(beat_from_loop(options.heartbeat)))
    with _receiver(usage.usage_path(options.listen.parent)) as receiver:
        tasks.append(asyncio.create_task(accountant.take_reports(receiver)))
        options.listen.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(
            accountant.serve, options.listen, limit=MAX_LINE, backlog=128
        )
        await stop.wait()
        server.close()
        options.listen.unlink(missing_ok=True)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    ledger.flush()


def _receiver(path: Path) -> socket.socket:
    receiver = private_socket.receive(path)
    receiver.setblocking(False)
    return receiver


def main() -> int:
    parser = argparse.ArgumentParser("inflight.access.accountant", description=__doc__)
    parser.add_argument("--listen", type=Path, required=True, metavar="SOCKET")
    parser.add_argument("--ledger", type=Path, required=True, metavar="FILE")
    parser.add_argument("--heartbeat", type=Path, metavar="FILE")
    parser.add_argument("--parent", type=int, default=os.getppid(), metavar="PID")
    options = parser.parse_args()
    end_with(options.parent)
    log.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o177)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # twice as many series
    try:
        asyncio.run(run(options))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

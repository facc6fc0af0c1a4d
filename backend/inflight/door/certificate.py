"""The certificate of a running server, read again when its files change."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from inflight.access.tls import TlsFiles
from inflight.errors import ConfigError

# A new certificate is used this soon.
REREAD_S = 1.0

logger = logging.getLogger(__name__)


class LiveCertificate:
    """What the next TLS handshake uses; connections keep what they began with. Thread-safe.

    New files that cannot be used leave the former certificate in use, so that a slip of an operator
    does not lock all clients out.

    Args:
        files: of the certificate.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the files cannot be used.
    """

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._signature = files.signature()
        self._contents, self._context = files.read(), files.context()
        self._looked_at = clock()

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        with self._lock:
            self._refresh()
            return self._context

    def contents(self) -> tuple[bytes, bytes, bytes | None]:
        """As of `TlsFiles.read`, for the next connection."""
        with self._lock:
            self._refresh()
            return self._contents

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked_at < REREAD_S:
            return
        self._looked_at = now
        # Taken first: a change during the reading is found the next time.
        signature = self._files.signature()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            contents, context = self._files.read(), self._files.context()
        except ConfigError as error:
            logger.error("the former certificate stays in use: %s", error)
            return
        self._contents, self._context = contents, context
        logger.warning("new connections use the new certificate")


class LiveContext(ssl.SSLContext):
    """A context for servers that take one for all of their connections."""

    certificate: LiveCertificate

    @classmethod
    def of(cls, certificate: LiveCertificate) -> LiveContext:
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.certificate = certificate
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.certificate.context().wrap_bio(*args, **options)

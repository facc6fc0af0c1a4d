"""The chat page: its files, their headers and routes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATHS = ("/", "/ui")
_FOLDER = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
# In index.html, in place of the folder of the other files.
_PLACEHOLDER = b"ASSETS"
# With trusted types, the browser refuses text as HTML, such as innerHTML; nodes are built singly.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_REVALIDATED = "no-cache"
_FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it is served.

    Attributes:
        kind: media type.
        caching: value of Cache-Control.
    """

    content: bytes
    kind: str
    caching: str

    async def respond(self, request: Request) -> Response:
        tag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'
        headers = {**_HEADERS, "ETag": tag, "Cache-Control": self.caching}
        known = request.headers.get("if-none-match", "")
        if tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.kind)


class Page:
    """The page at `PATHS`. The paths of its other files contain a digest of all files, so that
    browsers cache them for good.

    Attributes:
        paths: of all files.
    """

    def __init__(self) -> None:
        found = {
            path.name: path.read_bytes()
            for path in sorted(_FOLDER.iterdir())
            if path.suffix in _TYPES
        }
        folder = f"/ui/{_digest_of(found)}"
        index = found.pop(_INDEX).replace(_PLACEHOLDER, folder.encode())
        self._files = {path: _file(_INDEX, index, _REVALIDATED) for path in PATHS}
        for name, content in found.items():
            self._files[f"{folder}/{name}"] = _file(name, content, _FOREVER)
        self.paths = frozenset(path.encode() for path in self._files)

    def routes(self) -> list[Route]:
        return [Route(path, file.respond) for path, file in self._files.items()]


def _digest_of(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(b"%s %d\n%s" % (name.encode(), len(content), content))
    return digest.hexdigest()[:16]


def _file(name: str, content: bytes, caching: str) -> _File:
    return _File(content, _TYPES[Path(name).suffix], caching)

"""JSON values in errors for clients."""

from __future__ import annotations

import json
from typing import Any


class Unreadable(Exception):
    """A value that is not allowed; the text names its key and what is allowed."""


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."

"""Why models could not be loaded, by tritonserver's log."""

from __future__ import annotations

import re

NO_SHARED_MEMORY = re.compile(rb"shared memory key [^\n]* No space left on device")
"""What it logs if there is none for the process of a model."""


def load_failures(log: str) -> list[str]:
    """The reasons why models failed to load, one line each, from tritonserver's log.

    A model that failed only because another one did is omitted.
    """
    reasons: dict[str, None] = {}
    pattern = r"failed to load '([^']+)' version \d+: (?:[A-Z][a-z]+(?: [a-z]+)*: )?(.+)"
    for model, reason in re.findall(pattern, log):
        # The rest is a traceback; it stays in the log.
        text = reason.split("\\n")[0].rstrip('" ')
        text = re.sub(r"^(?:\w+\.)*\w*(?:Error|Exception): ", "", text)
        reasons[f"model {model}: {text}"] = None
    pattern = (
        r"(?:Poll failed for model directory|failed to start|failed to poll model"
        r"|ensemble \S+ contains models that are not available) .+"
    )
    for text in re.findall(pattern, log):
        reasons[text.split("\\n")[0].rstrip('" ')] = None
    return list(reasons)

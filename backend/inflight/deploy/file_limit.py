"""The limit on open files: each client takes one, and each stream several."""

from __future__ import annotations

import resource

from inflight.errors import ConfigError

WANTED = 65_536
NEEDED = 1_024


def raise_file_limit() -> None:
    """Raise this process's limit, which its children inherit.

    Raises:
        ConfigError: not even the needed number is allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        allowed = soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed != resource.RLIM_INFINITY and allowed < NEEDED:
        raise ConfigError(
            f"at most {allowed} files may be open (ulimit -n); a server needs {NEEDED} or more: "
            "raise the hard limit, for example with LimitNOFILE= in systemd or "
            "--ulimit nofile=65536 in Docker"
        )

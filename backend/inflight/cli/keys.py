"""`inflight key`: API keys of a server."""

from __future__ import annotations

import dataclasses
import getpass
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from inflight.cli.option_groups import expand_groups

app = typer.Typer(no_args_is_help=True, help="API keys, for `inflight serve --keys FILE`.")

Keys = Annotated[
    Path | None,
    typer.Option("--keys", help="The keys file. Default: ~/.config/inflight/keys.json."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_DAY_S = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """What a key may use."""

    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Limit.")] = None
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Limit on tokens of prompts and outputs.")
    ] = None
    concurrent_requests: Annotated[int | None, typer.Option(min=1, help="Limit.")] = None


@app.command("create")
@expand_groups
def create(
    *,
    tenant: Annotated[str, typer.Option(help="On whose account requests with the key run.")],
    admin: Annotated[bool, typer.Option("--admin", help="It may also read /metrics.")] = False,
    expires_days: Annotated[
        float | None, typer.Option(min=0.0, help="Days until it expires. Default: never.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model it may use; repeatable. Default: all.")
    ] = None,
    limits: LimitOptions,
    keys: Keys = None,
    json_: Json = False,
) -> None:
    """Create a key and print it, once: only its hash is stored."""
    import msgspec

    from inflight.access import keys_file
    from inflight.access.key import KeyLimits, issue

    path = keys or keys_file.default_path()
    key, secret = issue(
        tenant,
        role="admin" if admin else "user",
        expires_in_s=None if expires_days is None else expires_days * _DAY_S,
        models=tuple(model or ()),
        limits=KeyLimits(**dataclasses.asdict(limits)),
    )
    keys_file.add(path, key)
    _audit("key.created", key.id, key.tenant, path)
    if json_:
        typer.echo(msgspec.json.encode({"key": secret, **_shown(key)}).decode())
    else:
        typer.echo(secret)
        typer.echo(
            f"id {key.id}, tenant {key.tenant}, stored in {path}; the key is not shown again",
            err=True,
        )


@app.command("list")
def list_(keys: Keys = None, json_: Json = False) -> None:
    """List the keys, without their secrets."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from inflight.access import keys_file

    found = keys_file.read(keys or keys_file.default_path())
    if json_:
        typer.echo(msgspec.json.encode([_shown(key) for key in found]).decode())
        return
    table = Table("id", "tenant", "role", "created", "expires", "models", "limits", box=None)
    for key in found:
        expires = "never" if key.expires is None else _date(key.expires)
        table.add_row(
            *(key.id, key.tenant, key.role, _date(key.created)),
            f"{expires} (expired)" if key.has_expired() else expires,
            ", ".join(key.models) or "all",
            ", ".join(f"{k} {v}" for k, v in msgspec.to_builtins(key.limits).items()) or "none",
        )
    Console().print(table)


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="From `inflight key list`.")], keys: Keys = None
) -> None:
    """Remove a key; running servers refuse it within a second."""
    from inflight.access import keys_file

    path = keys or keys_file.default_path()
    key = keys_file.revoke(path, key_id)
    _audit("key.revoked", key.id, key.tenant, path)
    typer.echo(f"revoked {key.id} of tenant {key.tenant}", err=True)


def _shown(key: Any) -> dict[str, Any]:
    import msgspec

    stored: dict[str, Any] = msgspec.to_builtins(key)
    del stored["sha256"]
    return {"id": key.id, **stored}


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _audit(event: str, key_id: str, tenant: str, path: Path) -> None:
    from inflight.access import audit

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    log = audit.AuditLog(audit.default_path())
    log.write(event, key=key_id, tenant=tenant, user=user, file=str(path.absolute()))

"""Certificates of the server."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

import certificates
from inflight.access.tls import TlsFiles, chosen
from inflight.errors import ConfigError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificates:
    return certificates.make(tmp_path_factory.mktemp("tls"))


def test_the_oldest_version_is_1_2(made: certificates.Certificates) -> None:
    context = made.server.context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE


def test_with_an_authority_clients_need_certificates(made: certificates.Certificates) -> None:
    files = TlsFiles(made.server.cert, made.server.key, str(made.ca))
    assert files.context().verify_mode == ssl.CERT_REQUIRED


def test_all_or_none_are_given() -> None:
    assert chosen(None, None, None) is None
    for given in (("a", None, None), (None, "b", None), (None, None, "c"), ("a", None, "c")):
        with pytest.raises(ConfigError, match="--tls-cert and --tls-key: one is missing"):
            chosen(*given)
    assert chosen("a", "b", None) == TlsFiles("a", "b")


def test_files_that_cannot_be_used_are_named(
    made: certificates.Certificates, tmp_path: Path
) -> None:
    cert, key = made.server.cert, made.server.key
    junk, missing = str(tmp_path / "junk.pem"), str(tmp_path / "missing.pem")
    Path(junk).write_text("junk")
    other = str(made.client[1])
    for files, text in (
        (TlsFiles(missing, key), f"--tls-cert: {missing}: No such file"),
        (TlsFiles(cert, missing), f"--tls-key: {missing}: No such file"),
        (TlsFiles(cert, key, missing), f"--tls-client-ca: {missing}: No such file"),
        (TlsFiles(junk, key), f"{junk} and {key} are not a certificate and its private key"),
        (TlsFiles(cert, junk), f"{cert} and {junk} are not a certificate and its private key"),
        (TlsFiles(cert, other), f"{cert} and {other} are not a certificate and its private key"),
        (TlsFiles(cert, key, junk), f"--tls-client-ca: {junk} has no certificates"),
        (TlsFiles(str(tmp_path), key), "Is a directory"),
    ):
        with pytest.raises(ConfigError) as refused:
            files.context()
        assert text in str(refused.value)


def test_a_key_with_a_passphrase_is_an_error_not_a_question(
    made: certificates.Certificates, tmp_path: Path
) -> None:
    loaded = serialization.load_pem_private_key(Path(made.server.key).read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="without a passphrase"):
        TlsFiles(made.server.cert, str(locked)).context()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--tls-cert", "missing.pem"), "--tls-cert and --tls-key: one is missing"),
        (("--tls-cert", "missing.pem", "--tls-key", "x"), "--tls-cert: missing.pem: No such file"),
        (("--keys", "missing.json"), "create it with `inflight key create`"),
    ],
)
def test_serve_does_not_start_without_its_files(
    arguments: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "inflight.cli.app", "serve", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ended.returncode == 1
    assert text in ended.stderr and "Traceback" not in ended.stderr


def test_serve_refuses_keys_and_tls_without_a_door_for_grpc(
    made: certificates.Certificates, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "inflight.cli.app", "serve", "--no-grpc-guard", *made.options]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ended.returncode == 1
    assert "--no-grpc-guard: cannot be combined with --keys or TLS" in ended.stderr

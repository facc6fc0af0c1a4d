"""Serves and asks within a network namespace that has a loopback device and nothing else:
`unshare --map-root-user --net python isolated_network.py FOLDER`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kserve
from supervised import serve


def main(folder: Path) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with serve(folder, "echo", "--grpc-guard") as serving:
        print(serving.canary())
        print(kserve.generate(serving.http, "generate", text_input="x", max_tokens=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

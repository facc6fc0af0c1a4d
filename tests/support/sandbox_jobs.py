"""A sandbox whose jobs are Python, for the sandbox's own tests: `python -m sandbox_jobs`."""

from __future__ import annotations

from inflight.sandbox.server import serve
from inflight.sandbox.worker import Work, allow_cpu


def prepare(setup: bytes) -> Work:
    count = [0]

    def work(job: bytes) -> bytes:
        count[0] += 1
        names = {"setup": setup, "count": count[0], "allow_cpu": allow_cpu, "answer": b""}
        exec(job.decode(), names)
        answer: bytes = names["answer"]
        return answer

    return work


if __name__ == "__main__":
    serve(prepare, keeps_workers=True)

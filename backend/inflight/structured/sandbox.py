"""The grammars' sandbox: a child process that test-compiles guides."""

from __future__ import annotations

import msgspec

from inflight.core.output_constraint import StructuredOutput
from inflight.sandbox.messages import Limits
from inflight.sandbox.process import LimitExceeded, SandboxLost, SandboxProcess
from inflight.structured.grammar import MAX_SOURCE_BYTES, Verdict
from inflight.structured.vocabulary import Vocabulary

__all__ = ["MEMORY_LIMIT", "TIME_LIMIT_S", "Sandbox", "SandboxLost"]

TIME_LIMIT_S = 1.0
MEMORY_LIMIT = 512 << 20


class Sandbox(SandboxProcess):
    """Test-compiles guides.

    Args:
        vocabulary: of the model.
        time_limit_s: for each guide.
        memory_limit: bytes that compiling one may take.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit: int = MEMORY_LIMIT,
    ) -> None:
        super().__init__(
            "inflight.structured.sandbox_process",
            "grammar compiler",
            Limits(cpu_s=time_limit_s, wall_s=time_limit_s, memory=memory_limit),
            lambda: msgspec.msgpack.encode(vocabulary),
            max_answer_bytes=2 * MAX_SOURCE_BYTES,
        )

    def examine(self, constraint: StructuredOutput) -> Verdict:
        """Test-compile a guide; takes at most the time limit once the process runs.

        Raises:
            SandboxLost: the process died or hung; the next call starts another one.
            EngineError: the process does not start.
        """
        try:
            answer = self.run(msgspec.msgpack.encode(constraint))
        except LimitExceeded as error:
            return Verdict(refusal=self._refusal(error))
        return msgspec.msgpack.decode(answer, type=Verdict)

    def _refusal(self, error: LimitExceeded) -> str:
        match error.cause:
            case "time":
                return f"too complex: it does not compile within {self.limits.wall_s:g} s"
            case "stack":
                return "too deeply nested: it overflows the compiler's stack"
            case "memory":
                mebibytes = self.limits.memory >> 20
                return f"too large: it does not compile within {mebibytes} MiB of memory"

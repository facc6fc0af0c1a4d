"""The mode in which a GPU's steps are launched."""

from __future__ import annotations

from types import TracebackType

import torch


class OnStream:
    """A context in which a stream is torch's current one, in inference mode. Not reentrant.

    The same as `torch.cuda.stream` and `torch.inference_mode`, whose checks and objects take the
    host a tenth of the step of a small model: hence the private functions that these call.

    Args:
        stream: of the current device.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = (stream.stream_id, stream.device_index, stream.device_type)

    def __enter__(self) -> None:
        self._mode = torch._C._InferenceMode(True)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._before = torch._C._cuda_getCurrentStream(self._stream[1])
        _set_stream(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _set_stream(self._before)
        self._mode.__exit__(kind, error, traceback)


def _set_stream(ids: tuple[int, int, int]) -> None:
    stream_id, device_index, device_type = ids
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )

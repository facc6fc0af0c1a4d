"""A GPU, as far as engines share its memory."""

from __future__ import annotations

from typing import Protocol


class Gpu(Protocol):
    """The GPU of an engine.

    Attributes:
        uuid: the same in all processes; that of a MIG instance if the engine runs on one.
        name: for messages, such as NVIDIA H200.
        total_bytes: of its memory.
    """

    uuid: str
    name: str
    total_bytes: int

    def free_bytes(self) -> int:
        """Memory that no process has allocated now."""


class CurrentGpu:
    """The GPU that torch uses in this process (see `Gpu`)."""

    def __init__(self) -> None:
        import torch

        self._device = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(self._device)
        self.uuid = str(properties.uuid)
        self.name = str(properties.name)
        self.total_bytes = int(properties.total_memory)

    def free_bytes(self) -> int:
        import torch

        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free

"""The table of the server's own metrics, which only the supervisor's endpoint shows.

They have none of the labels of a model. Label values that are only known at run time are missing
in the table.
"""

from __future__ import annotations

from inflight.engine.metrics.families import Family

SERVER_FAMILIES: tuple[Family, ...] = (
    Family(
        "server_ready",
        "gauge",
        "1 while all models are loaded and the server accepts requests, else 0.",
    ),
    Family(
        "server_live",
        "gauge",
        "1 while the server can recover by itself, 0 when it has to be restarted from outside.",
    ),
    Family(
        "server_not_ready_seconds",
        "counter",
        "Time that the server was not ready, since it was ready for the first time.",
    ),
    Family(
        "process_restarts",
        "counter",
        "Restarts of processes that exited or hung: tritonserver, each engine, each door.",
        ("process",),
        (),
    ),
    Family(
        "door_requests",
        "counter",
        "Requests at the doors by status (HTTP's number, gRPC's name), health probes excluded. 499 "
        "and CANCELLED: the client left before the end. A stream counts when it ends.",
        ("door", "status"),
        (),
    ),
    Family(
        "gateway_ignored_fields",
        "counter",
        "Fields of requests of OpenAI's API that the gateway does not know, and ignored.",
    ),
    Family(
        "host_memory_available_bytes",
        "gauge",
        "Memory that is available on the machine, or less below the limit of a control group (v2). "
        "Below `--min-free-memory` the server refuses new requests.",
    ),
    Family(
        "gpu_power_watts",
        "gauge",
        "Power of the GPU that the engines use. Absent without NVML or GPU, as the next two.",
        ("uuid", "gpu_name"),
        (),
    ),
    Family(
        "gpu_energy_joules",
        "counter",
        "Energy of that GPU since the server was started.",
        ("uuid", "gpu_name"),
        (),
    ),
    Family(
        "gpu_joules_per_token",
        "gauge",
        "Energy of that GPU per output token of all models, over the scrapes of the last minute; "
        "absent without tokens.",
        ("uuid", "gpu_name"),
        (),
    ),
)
"""All of them."""

SERVER_BY_STEM = {family.stem: family for family in SERVER_FAMILIES}

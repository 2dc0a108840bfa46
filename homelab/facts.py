"""Facts: what a node says of itself. The agent (`homelab.node.facts`) writes this JSON; here it gets types.

Unknown keys are ignored and missing ones are None or empty, because a probe that could not run is a finding, not a crash.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Loose(BaseModel):
    """Frozen, and tolerant: a node with another agent version must still be readable."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class GpuFacts(Loose):
    """One card, from `nvidia-smi --query-gpu`. Fields that a card answers with `[N/A]` are None."""

    index: int
    name: str
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None
    power_w: float | None = None
    compute_capability: str | None = None
    holders: tuple[str, ...] = ()


class Interface(Loose):
    """One network interface; `addresses` are "192.168.1.100/24"."""

    name: str
    up: bool = True
    addresses: tuple[str, ...] = ()
    kind: str = "physical"  # physical | wifi | virtual | loopback
    mtu: int | None = None
    speed_mbit: int | None = None


class Route(Loose):
    """How this node reaches a peer: by which interface, from which of its own addresses."""

    interface: str
    source: str


class ModelFacts(Loose):
    """The base model as it lies on this node. `config` is its config.json; `problem` says why it cannot be used."""

    found: bool
    path: str | None = None
    config: dict[str, Any] | None = None
    size_bytes: int | None = None
    problem: str | None = None


class FileFacts(Loose):
    """A data file on this node."""

    path: str
    found: bool
    size_bytes: int | None = None
    sha256: str | None = None
    rows: int | None = None  # about; None where they cannot be counted without a parser
    problem: str | None = None


class SpeedsFacts(Loose):
    """The file of measured speeds of the recipe's model and method; `content` as `homelab.worker.speeds` wrote it, not checked here."""

    path: str
    found: bool
    problem: str | None = None
    content: dict[str, Any] | None = None


class PortFacts(Loose):
    """Whether a port can be bound; if not, who holds it as far as this user may see."""

    free: bool
    holder: str | None = None
    holder_pid: int | None = None
    holder_run: str | None = None


class Facts(Loose):
    """Everything one node said in one answer."""

    node: str
    time: float
    hostname: str
    user: str
    home: str
    workdir: str
    workdir_writable: bool = True
    system: str = ""
    cpu_count: int = 1
    load_1min: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    python_executable: str = ""
    python_version: str = ""
    packages: dict[str, str | None] = {}
    torch_cuda: str | None = None
    nvidia_smi: str = "missing"  # "ok", "missing", or the text of its error
    driver_version: str | None = None
    driver_cuda: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    gpu_probe: dict[str, Any] | None = None  # torch's own view: arch list, matmul result per device; None on CPU nodes
    interfaces: tuple[Interface, ...] = ()
    own_name_addresses: tuple[str, ...] = ()
    routes: dict[str, Route] = {}
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    port: PortFacts | None = None
    model: ModelFacts | None = None
    speeds: SpeedsFacts | None = None
    data: dict[str, FileFacts] = {}
    runs_alive: tuple[str, ...] = ()
    power: str | None = None  # "mains" | "battery" | None when there is no battery

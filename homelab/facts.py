"""Facts: what a node says of itself. The agent (`homelab.node.facts`) writes this JSON; here it gets types.

Unknown keys are ignored and missing ones are None or empty, because a probe that could not run is a finding, not a crash.
"""

from __future__ import annotations

import ipaddress
import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

_LARGEST = 2**63  # no counter of a machine goes further
_FILES = ("config", "content")  # what stands in files may hold any number (Mamba2: Infinity); who uses it checks it


def _addresses(found: tuple[str, ...]) -> tuple[str, ...]:
    """Those that are addresses: the planner reckons with them."""
    return tuple(text for text in found if _is_address(text))


def _address(text: str) -> str:
    if not _is_address(text) or "/" in text:
        raise ValueError("not an address")
    return text


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_interface(text)
    except ValueError:
        return False
    return "%" not in text  # what follows it, the zone of an IPv6 address, may be any words


def _of_machine(value: Any, depth: int = 0, is_file: bool = False) -> None:
    """Raises ValueError for endless nesting, and outside of files for numbers that no machine has (NaN, infinities, thousands of digits)."""
    if depth > 50:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        for name, entry in value.items():
            _of_machine(entry, depth + 1, is_file or name in _FILES)
    elif isinstance(value, list | tuple):
        for entry in value:
            _of_machine(entry, depth + 1, is_file)
    elif is_file:
        return
    elif (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > _LARGEST):
        raise ValueError("it holds a number that no machine has")


def _probed(probe: dict[str, Any] | None) -> dict[str, Any] | None:
    devices = (probe or {}).get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        raise ValueError("devices is no list of objects")
    if not isinstance((probe or {}).get("arch_list") or [], list):
        raise ValueError("arch_list is no list")
    for device in devices:
        capability = device.get("capability") or []
        if not isinstance(capability, list | tuple) or not all(isinstance(number, int) for number in capability):
            raise ValueError("a capability is no pair of numbers")
    return probe


# Words that hints make commands of. Process 0 and below are groups of processes to kill(1).
Addresses = Annotated[tuple[str, ...], AfterValidator(_addresses)]
Address = Annotated[str, AfterValidator(_address)]
Pid = Annotated[int | None, AfterValidator(lambda pid: pid if pid is None or pid > 0 else None)]
Probe = Annotated[dict[str, Any] | None, AfterValidator(_probed)]
Run = Annotated[str, Field(pattern=r"^\w", max_length=200)]  # never an option of `homelab stop`


class Loose(BaseModel):
    """Frozen, and tolerant: a node with another agent version must still be readable."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class GpuHolder(Loose):
    """A process that holds memory of a card. `ours`: of the user we log in as, who may end it; `run`: of a run of this project."""

    pid: Pid = None
    program: str = ""
    memory_bytes: int | None = None
    user: str | None = None  # None where the process cannot be seen
    ours: bool = False
    run: Run | None = None
    type: str = ""  # "C" computes, "G" draws, "C+G"


class GpuFacts(Loose):
    """One card, from `nvidia-smi -q -x` (in polls: `--query-gpu`). What a card does not tell ("N/A") is None."""

    index: int
    name: str
    uuid: str | None = None
    bus_id: str | None = None  # "00000000:01:00.0"
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None  # by the driver; since 510 not part of `used`
    memory_free_bytes: int | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    compute_capability: str | None = None
    compute_mode: str | None = None  # "Default" | "Exclusive_Process" | "Prohibited"
    slowed_by: tuple[str, ...] = ()  # active reasons for lower clocks: "gpu_idle", "hw_thermal_slowdown", ...
    pcie_width: int | None = None  # lanes
    pcie_width_max: int | None = None
    mig: bool = False
    mig_bytes: tuple[int, ...] = ()  # memory of each MIG instance
    mig_free_bytes: tuple[int | None, ...] = ()  # of the same
    recovery_action: str | None = None  # what the driver asks for: "Reset", "Reboot", ...
    errors_now: int | None = None  # uncorrected memory errors since the driver was loaded
    errors_ever: int | None = None  # uncorrected memory errors of the card's life
    errors_mended: int = 0  # places taken out of use because of them
    repair_pending: bool = False
    repair_failed: bool = False
    holders: tuple[GpuHolder, ...] = ()
    nvlink: bool | None = None  # whether a bridge to another card is at work; None where it was not asked (one card)

    @property
    def free_bytes(self) -> int | None:
        """What a new process can have of the card; None where nvidia-smi does not tell."""
        if self.memory_free_bytes is not None or self.memory_total_bytes is None or self.memory_used_bytes is None:
            return self.memory_free_bytes
        return self.memory_total_bytes - self.memory_used_bytes - (self.memory_reserved_bytes or 0)


class AmdGpu(Loose):
    """A card of AMD, which training does not use."""

    name: str
    memory_total_bytes: int | None = None


class Xid(Loose):
    """An error report of the NVIDIA driver in the kernel log: number, how often, and how long ago the last was."""

    code: int
    bus_id: str  # "0000:01:00"
    count: int = 1
    last_s_ago: float | None = None
    program: str | None = None


class NvidiaOnBus(Loose):
    """NVIDIA cards on the PCI bus, and which kernel driver has them ("nvidia", "nouveau", "vfio-pci")."""

    cards: int = 0
    driver: str | None = None


class Interface(Loose):
    """One network interface; `addresses` are "192.168.1.100/24"."""

    name: str
    up: bool = True
    addresses: Addresses = ()
    kind: str = "physical"  # physical | wifi | virtual | loopback
    mtu: int | None = None
    speed_mbit: int | None = None


class Route(Loose):
    """How this node reaches a peer: by which interface, from which of its own addresses."""

    interface: str
    source: Address


class ModelFile(Loose):
    """One file of the model (`homelab.node.digests`). Small files have `sha256` alone, large ones a `sampled` digest, and `sha256` where it
    was computed once. `blob` is the sha256 that the hub's cache named the file by when it was downloaded."""

    size_bytes: int
    sampled: str | None = None
    sha256: str | None = None
    blob: str | None = None


class ModelFacts(Loose):
    """The base model as it lies on this node. `config` is its config.json; `problem` says why it cannot be used.

    `damaged`: it is there, and downloading or copying it again is the only way. `has_token` and `hub` ("ok", "offline", or why it
    cannot be reached) are asked where a hub model is not in the cache.
    """

    found: bool
    path: str | None = None
    config: dict[str, Any] | None = None
    size_bytes: int | None = None
    problem: str | None = None
    damaged: bool = False
    files: dict[str, ModelFile] = {}
    has_chat_template: bool | None = None
    has_token: bool | None = None
    hub: str | None = None


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
    holder_pid: Pid = None
    holder_run: Run | None = None


class SleepFacts(Loose):
    """What systemd-logind does by itself, from its configuration and systemd's (logind.conf(5))."""

    masked: tuple[str, ...] = ()  # of sleep.target, suspend.target, ...
    idle_action: str = "ignore"
    lid: bool = False
    lid_action: str = "suspend"  # as it applies on mains, or on battery where the node runs on it
    kills_processes: bool = False  # at logout, those that the login started: KillUserProcesses and the lists beside it


class SuspendedFacts(Loose):
    """How long the node was asleep since it started; `ago_s` since it woke last, None where the journal does not tell."""

    asleep_s: float
    up_s: float
    ago_s: float | None = None


class UpdateFacts(Loose):
    """Unattended upgrades (Debian, Ubuntu). `driver_packages` are NVIDIA's packages they may exchange under a running driver."""

    reboots: bool = False
    reboot_time: str = "now"
    driver_packages: tuple[str, ...] = ()


class CollectiveFacts(Loose):
    """The record of the newest collective smoke test that passed here; `fingerprint` is that of the cluster then."""

    fingerprint: str
    time: float | None = None
    results: tuple[dict[str, Any], ...] = ()


class Facts(Loose):
    """Everything one node said in one answer."""

    @model_validator(mode="before")
    @classmethod
    def _is_sane(cls, value: Any) -> Any:
        _of_machine(value)
        return value

    node: str
    broken: dict[str, str] = {}  # probes that broke (`homelab.node.probes`), with their error
    time: float | None = None
    hostname: str = ""
    user: str = ""
    home: str = ""
    workdir: str = ""
    workdir_writable: bool = True
    workdir_problem: str | None = None  # the system's own words where it cannot be written
    workdir_identity: str | None = None  # equal on two nodes: they are one machine with one workdir
    system: str = ""
    cpu_count: int = 1
    load_1min: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    python_executable: str = ""
    python_version: str = ""
    packages: dict[str, str | None] = {}
    unsloth: str | None = None  # the version in the environment that trains with it (unsloth_python of cluster.toml); None: none there
    unsloth_takes: dict[str, str] = {}  # the newest versions that one works with, by its own metadata: {"transformers": "<=5.17.0"}
    torch_cuda: str | None = None
    nccl: str | None = None  # the version that torch brought along; None where it is not known
    code_hash: str | None = None  # of the files the agent runs from, as `homelab.remote.ship` reckons it
    nvidia_smi: str = "missing"  # "ok", "missing", or the text of its error
    driver_version: str | None = None
    driver_cuda: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    gpus_left_out: tuple[GpuFacts, ...] = ()  # by the choice in cluster.toml (`homelab.planning.cards`), never by the node
    gpu_probe: Probe = None  # torch's own view: arch list, matmul result per device; None on CPU nodes; "not_asked": by these runs in use
    nvidia_on_bus: NvidiaOnBus | None = None  # looked for only where nvidia-smi shows no card
    amd_gpus: tuple[AmdGpu, ...] = ()
    xids: tuple[Xid, ...] | None = None  # None: the kernel log cannot be read
    interfaces: tuple[Interface, ...] = ()
    own_name_addresses: tuple[str, ...] = ()
    routes: dict[str, Route] = {}
    firewall: str | None = None  # "ufw" | "firewalld" | "nftables"; None: none seen, which does not mean that there is none
    firewall_chains: tuple[str, ...] = ()  # of nftables: "inet filter input", each that can drop what comes in
    firewall_out: str | None = None  # "ufw" | "nftables": what can stop that which leaves the node; None: none seen
    firewall_out_chains: tuple[str, ...] = ()
    firewall_seen: bool = False  # the rules at work could be read: what is not among them is not there
    wsl: str | None = None  # inside of WSL: how it reaches the network ("nat", "mirrored", ...); None elsewhere
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    disk_free_inodes: int | None = None  # None where the file system does not count them
    shm_free_bytes: int | None = None
    temporary_folder: str | None = None  # where Python puts temporary files; None: nowhere
    temporary_free_bytes: int | None = None
    cache_folder: str = "~/.cache/huggingface/hub"  # where the Hub's cache is, as the node's environment says
    cache_free_bytes: int | None = None  # of the disk that holds it, where that is not the workdir's
    memory_limit_bytes: int | None = None  # of the control group the login is in, lowest of its ancestors
    memory_limit_used_bytes: int | None = None  # without what the kernel can drop
    open_files_soft: int | None = None  # RLIMIT_NOFILE of the login; None: unlimited
    open_files_hard: int | None = None
    port: PortFacts | None = None
    model: ModelFacts | None = None
    speeds: SpeedsFacts | None = None
    data: dict[str, FileFacts] = {}
    runs_alive: tuple[Run, ...] = ()
    secrets_removed: tuple[Run, ...] = ()  # of runs that were over: the node had lost power in them
    collective: CollectiveFacts | None = None
    power: str | None = None  # "mains" | "battery" | None when there is no battery
    sleep: SleepFacts | None = None  # None where nothing puts the node to sleep by itself (no systemd)
    suspended: SuspendedFacts | None = None  # None where it was never asleep since it started
    reboot_required: tuple[str, ...] | None = None  # packages that ask for a restart; None: none does
    updates: UpdateFacts | None = None  # None where nothing updates the node by itself

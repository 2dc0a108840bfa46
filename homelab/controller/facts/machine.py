"""The machine itself: system, memory, disks, power, and the runs that are alive on it."""

from __future__ import annotations

from typing import Annotated

from homelab.controller.base.models import WireModel
from homelab.controller.facts.base import Run
from homelab.controller.facts.reading import AsMessage
from homelab.shared.protocol.run_messages import RunAtWork, RunRecovered


class SystemFacts(WireModel):
    """Who the login is on which system, the clock, processors and memory."""

    time: float | None = None
    time_s_ago: float | None = None  # how long before the end of the answer the clock was read
    hostname: str = ""
    user: str = ""
    home: str = ""
    os: str = ""  # "Debian GNU/Linux 12 (bookworm) x86_64"
    cpu_count: int = 1
    load_1min: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None  # of the control group the login is in, lowest of its ancestors
    memory_limit_used_bytes: int | None = None  # without what the kernel can drop


class ResourcesFacts(WireModel):
    """The workdir and its disk, temporary files, the Hub's cache, shared memory, open files."""

    workdir: str = ""
    workdir_writable: bool = True
    workdir_problem: str | None = None  # the system's own words where it cannot be written
    workdir_identity: str | None = None  # equal on two nodes: they are one machine with one workdir
    workdir_mark: str | None = None  # equal on two nodes: they share it over the network; None where it lies on a disk of their own
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    disk_turns: bool | None = None  # a hard disk; None where the kernel does not say which device it is
    disk_free_inodes: int | None = None  # None where the file system does not count them
    shm_free_bytes: int | None = None
    temporary_folder: str | None = None  # where Python puts temporary files; None: nowhere
    temporary_free_bytes: int | None = None
    cache_folder: str = "~/.cache/huggingface/hub"  # where the Hub's cache is, as the node's environment says
    cache_free_bytes: int | None = None  # of the disk that holds it, where that is not the workdir's
    open_files_soft: int | None = None  # RLIMIT_NOFILE of the login; None: unlimited
    open_files_hard: int | None = None


class CompilerFacts(WireModel):
    """What compiles C on the node against the headers of its Python. `error`: what the compiler said of a small program; None: it compiled."""

    compiler: str | None = None  # None: there is none
    headers: str = ""  # the folder that should hold Python.h
    error: str | None = None


class PythonFacts(WireModel):
    """The Python that answered, and the packages beside it."""

    executable: str = ""
    is_another: bool = False  # nothing is at the path of cluster.toml, and the node's python3 answered in its place
    made_by_setup: bool = False  # its environment was made by `homelab setup`
    has_pip: bool | None = None
    uv: str | None = None  # the path of uv, where there is no pip
    is_managed: bool = False  # a Python of the system that refuses to install packages (PEP 668)
    version: str = ""
    packages: dict[str, str | None] = {}
    unsloth: str | None = None  # the version in the environment that trains with it (unsloth_python of cluster.toml); None: none there
    unsloth_takes: dict[str, str] = {}  # the newest versions that one works with, by its own metadata: {"transformers": "<=5.17.0"}
    compiler: CompilerFacts | None = None  # None: the recipe compiles nothing
    torch_cuda: str | None = None
    nccl: str | None = None  # the version that torch brought along; None where it is not known
    code_hash: str | None = None  # of the files the agent runs from (`homelab.controller.remote.ship`)


class SleepFacts(WireModel):
    """What systemd-logind does by itself, from its configuration and systemd's (logind.conf(5))."""

    masked: tuple[str, ...] = ()  # of sleep.target, suspend.target, ...
    idle_action: str = "ignore"
    lid: bool = False
    lid_action: str = "suspend"  # as it applies on mains, or on battery where the node runs on it
    kills_processes: bool = False  # at logout, those that the login started: KillUserProcesses and the lists beside it


class SuspendedFacts(WireModel):
    """How long the node was asleep since it started; `ago_s` since it woke last, None where the journal does not tell."""

    asleep_s: float
    up_s: float
    ago_s: float | None = None


class UpdateFacts(WireModel):
    """Unattended upgrades (Debian, Ubuntu). `driver_packages` are NVIDIA's packages they may exchange under a running driver."""

    reboots: bool = False
    reboot_time: str = "now"
    driver_packages: tuple[str, ...] = ()


class PowerFacts(WireModel):
    """Whether the node stays awake and on."""

    source: str | None = None  # "mains" | "battery" | None when there is no battery
    sleep: SleepFacts | None = None  # None where nothing puts the node to sleep by itself (no systemd)
    suspended: SuspendedFacts | None = None  # None where it was never asleep since it started
    reboot_required: tuple[str, ...] | None = None  # packages that ask for a restart; None: none does
    updates: UpdateFacts | None = None  # None where nothing updates the node by itself
    ends_with_windows: bool | None = None  # a WSL2 that is ended when its last window is closed; None where it is no WSL2


class RunsFacts(WireModel):
    """Runs of this project on the node. `at_work`: what those do that are alive. `recovered`: nothing of them is alive, and their supervisor is at work."""

    alive: tuple[Run, ...] = ()
    at_work: dict[Run, Annotated[RunAtWork, AsMessage]] = {}
    recovered: dict[Run, Annotated[RunRecovered, AsMessage]] = {}
    secrets_removed: tuple[Run, ...] = ()  # of runs that were over: the node had lost power in them

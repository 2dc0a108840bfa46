"""The plan as data: what `homelab plan` prints and `homelab launch` executes is one and the same object."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A value: never changed after it was decided."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Choice(Frozen):
    """One decision and its reason, as `homelab plan --why` prints it."""

    subject: str
    value: str
    because: str


class MemoryItem(Frozen):
    """One line of an itemised estimate."""

    name: str
    size_bytes: int


class MemoryEstimate(Frozen):
    """What one rank will hold at its peak. `available_bytes` is None where nobody knows (offline, `[N/A]` cards)."""

    items: tuple[MemoryItem, ...]
    available_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Sum of the items."""
        return sum(item.size_bytes for item in self.items)

    @property
    def fits(self) -> bool | None:
        """None when the available memory is not known."""
        return None if self.available_bytes is None else self.total_bytes <= self.available_bytes


class RankPlan(Frozen):
    """One process: which card, and how many samples of every global batch it computes."""

    rank: int
    node: str
    local_rank: int
    device_name: str
    share: int
    micro_batch: int
    memory: MemoryEstimate | None = None


class NodePlan(Frozen):
    """One machine's part: the torchrun command as an argument list and its environment (no secrets in it)."""

    name: str
    node_rank: int
    lan_address: str
    interface: str
    rank_count: int
    workdir: str
    run_dir: str
    environment: dict[str, str]
    command: tuple[str, ...]


class Plan(Frozen):
    """Who does what in one attempt of a run."""

    run: str
    attempt: int
    world_size: int
    backend: str  # nccl | gloo
    device: str  # cuda | cpu
    precision: str  # bf16 | fp16 | fp32
    strategy: str  # ddp | fsdp | zero2 | zero3
    head: str
    master_address: str
    master_port: int
    resume_step: int
    ranks: tuple[RankPlan, ...]
    nodes: tuple[NodePlan, ...]
    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def node(self, name: str) -> NodePlan:
        """The part of this node; KeyError when it has none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

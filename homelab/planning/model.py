"""The plan as data: what `homelab plan` prints and `homelab launch` executes is one and the same object."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, field_validator

from homelab.plain import plain_text


class Frozen(BaseModel):
    """A value: never changed after it was decided."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Shown(Frozen):
    """What goes to a terminal: its words come from nodes and from files, and nothing is left in them that a terminal would obey."""

    @field_validator("*", mode="before")
    @classmethod
    def _harmless(cls, value: object) -> object:
        if isinstance(value, tuple | list):
            return tuple(plain_text(entry) if isinstance(entry, str) else entry for entry in value)
        return plain_text(value) if isinstance(value, str) else value


class Choice(Frozen):
    """One decision and its reason, as `homelab plan --why` prints it."""

    subject: str
    value: str
    because: str


class MemoryItem(Frozen):
    """One line of an itemised estimate."""

    name: str
    size_bytes: int


class DryRun(Frozen):
    """A step of the real model without its weights, on `node`: the peak of what it holds, the operation there (torch's name), and
    what was estimated for the same by formulas. CUDA context, communicator, allocator and process are in neither."""

    node: str
    peak_bytes: int
    at: str
    analytic_bytes: int
    seconds: float


class MemoryEstimate(Frozen):
    """What one rank will hold at its peak. `available_bytes` is None where nobody knows (offline, `[N/A]` cards).

    Where there is a dry run, the items are its own; `dry_run_scaled`: the formulas', corrected by the dry run of another rank.
    """

    items: tuple[MemoryItem, ...]
    available_bytes: int | None = None
    dry_run: DryRun | None = None
    dry_run_scaled: float | None = None

    @property
    def total_bytes(self) -> int:
        """Sum of the items."""
        return sum(item.size_bytes for item in self.items)

    @property
    def fits(self) -> bool | None:
        """None when the available memory is not known."""
        return None if self.available_bytes is None else self.total_bytes <= self.available_bytes


class RankSpeed(Frozen):
    """Seconds of a rank: per optimizer step, per forward and backward pass, per token (see `homelab.worker.speed`)."""

    step_s: float
    micro_batch_s: float
    token_s: float


class RankPlan(Frozen):
    """One process: which card, and how many samples of every global batch it computes.

    `share` is what is expected where `Plan.balance` is "measured", and fixed where it is "fixed". `speed` is None while nothing is
    known of it. `token_cap` is the longest row its memory takes; None: any. `card` is the uuid of its card; None: not known.
    """

    rank: int
    node: str
    local_rank: int
    device_name: str
    share: int
    micro_batch: int
    memory: MemoryEstimate | None = None
    speed: RankSpeed | None = None
    token_cap: int | None = None
    card: str | None = None


class SpareCard(Shown):
    """A card that takes no part, because cluster.toml names others of its node. `index` is nvidia-smi's."""

    index: int
    name: str


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
    spare_cards: tuple[SpareCard, ...] = ()


class RankTime(Frozen):
    """One rank in a typical step. `source`: measured | scaled | owner | data sheet. `alone_tokens_per_s`: doing all the batch itself."""

    rank: int
    node: str
    source: str
    alone_tokens_per_s: float
    tokens: int
    busy_s: float


class NodeGain(Frozen):
    """What a node adds: `gain` 0.25 means that with it the cluster does 25 % more tokens per second than without it."""

    node: str
    gain: float
    alone_tokens_per_s: float


class TimeEstimate(Frozen):
    """How long the training takes, from speeds, rows and the wire. Each `*_because` says what it rests on.

    `step_s` is `compute_s` (the rank that ends last) plus `wire_s`; `best_step_s` is the same if rows could be divided at will,
    `equal_step_s` with equal shares. Efficiencies are fractions of the sum of the ranks' speeds alone. `hours` is to the end, with
    saves and evaluations, without the start; None where the number of steps is not known.
    """

    is_measured: bool
    steps: int | None
    row_tokens: float
    rows_because: str
    compute_s: float
    wire_s: float
    wire_because: str
    step_s: float
    best_step_s: float
    equal_step_s: float
    tokens_per_s: float
    efficiency: float
    equal_efficiency: float
    save_s: float
    evaluate_s: float
    hours: float | None
    ranks: tuple[RankTime, ...]
    gains: tuple[NodeGain, ...]
    verdict: tuple[str, ...] = ()


class Plan(Frozen):
    """Who does what in one attempt of a run. `left_out_because`: why a node of the cluster is not in it, where a recovery left it out."""

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
    resume_digest: str = ""
    """Of the state of the checkpoint to go on from (`homelab.worker.replicas`); empty where that is not known."""
    ranks: tuple[RankPlan, ...]
    nodes: tuple[NodePlan, ...]
    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    left_out_because: dict[str, str] = {}
    balance: str = "fixed"  # measured | fixed
    time: TimeEstimate | None = None

    @property
    def step_s(self) -> float | None:
        """Seconds of an optimizer step, as expected; None where nothing is known of it."""
        return self.time.step_s if self.time else None

    def node(self, name: str) -> NodePlan:
        """The part of this node; KeyError when it has none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

"""The plan as data: `homelab plan` prints and `homelab launch` executes the same object."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from homelab.controller.base.models import DisplayValue, Value
from homelab.controller.planning.memory_estimate import MemoryEstimate, StreamingPlan
from homelab.shared.law.speed import Speed
from homelab.shared.recipe.parallel import StrategyName


class Choice(Value):
    """One decision and its reason, as `homelab plan --why` prints it."""

    subject: str
    value: str
    because: str


class StagePlan(Value):
    """A rank's layers in a pipeline, see `homelab.shared.law.stage`."""

    number: int
    begin: int
    end: int
    layers: int
    work: float
    in_flight: int


class RankPlan(Value):
    """One process: which card, and how many samples of every global batch it computes.

    In a pipeline every rank computes its layers of all samples, which are the share of the first stage's.

    `share` is what is expected where `Plan.balance` is "measured", and fixed where it is "fixed". `speed` is None while nothing is
    known of it. `token_cap` is the longest row its memory takes; None: any. `card` is the uuid of its card, `capability` CUDA's number of its
    generation ((8, 6)); None: not known.
    """

    rank: int
    node: str
    local_rank: int
    device_name: str
    share: int
    micro_batch: int
    memory: MemoryEstimate | None = None
    speed: Speed | None = None
    token_cap: int | None = None
    card: str | None = None
    capability: tuple[int, int] | None = None
    stage: StagePlan | None = None
    streaming: StreamingPlan | None = None

    @property
    def holds_all_layers(self) -> bool:
        """Whether its device holds the whole model, or its part of every layer."""
        return self.stage is None and self.streaming is None

    def work_text(self, rows: int) -> str:
        """Its rows of a batch of so many, or its layers of all rows."""
        if self.stage is not None:
            return f"layers {self.stage.begin} to {self.stage.end - 1}"
        return f"{self.share} of {rows}" if rows else "its own"


class SpareCard(DisplayValue):
    """A card that takes no part, because cluster.toml names others of its node. `index` is nvidia-smi's."""

    index: int
    name: str


class NodePlan(Value):
    """One machine's part: the command as an argument list and its environment (no secrets in it).

    Before a launcher has rendered the plan, `command` is empty, `environment` holds what this node alone has, and `python` is its interpreter.
    """

    name: str
    node_rank: int
    lan_address: str
    interface: str
    rank_count: int
    workdir: str
    run_dir: str
    environment: dict[str, str]
    command: tuple[str, ...] = ()
    python: str = Field(default="", exclude=True)
    spare_cards: tuple[SpareCard, ...] = ()


class LaunchSpec(Value):
    """What is started, wherever that is: no address, no port and no rank of a node is in it. A launcher (`homelab.controller.launchers`) renders it.

    `arguments` go to Python, behind the file `script` where there is one. `code`, `script` and `inputs` are paths below a node's work
    folder; `inputs` have to be there. `processes_per_node` is in the order of the plan's nodes. `environment` is the same on every node;
    each variable of `node_environment` holds that property of its node.
    """

    arguments: tuple[str, ...]
    script: str | None
    code: str
    inputs: tuple[str, ...]
    processes_per_node: tuple[int, ...]
    environment: dict[str, str]
    node_environment: dict[str, Literal["name", "interface", "code_dir", "run_dir", "saved_dir"]]


class Placement(Value):
    """Where an attempt runs: the address and the port at which its processes meet, and its nodes in rank order.

    `log_dir`: where the ranks' output goes, from the folder in which a node's command is started; None: into the attempt's own folders.
    """

    run: str
    attempt: int
    master_address: str
    master_port: int
    nodes: tuple[NodePlan, ...]
    log_dir: str | None = None


class LaunchDocument(Value):
    """One text that starts a plan on all its nodes (a batch script, a manifest), and the usual name of its file (no secrets in it)."""

    file_name: str
    text: str


class RankTime(Value):
    """One rank in a typical step. `source`: measured | scaled | owner | data sheet | measured by others: WHO. `alone_tokens_per_s`: doing all the batch itself."""

    rank: int
    node: str
    source: str
    alone_tokens_per_s: float
    tokens: int
    busy_s: float


class NodeGain(Value):
    """What a node adds: `gain` 0.25 means that with it the cluster does 25 % more tokens per second than without it."""

    node: str
    gain: float
    alone_tokens_per_s: float


class FewerNodes(Value):
    """The nodes of a plan that should train without the others: "EDIT: BECAUSE" is a sentence."""

    nodes: tuple[str, ...]
    edit: str
    because: str

    @property
    def option(self) -> str:
        """As a person types it."""
        return f"--nodes {','.join(self.nodes)}"


class StartPart(Value):
    """One part of a start (`homelab.controller.planning.time.start_up`): usual seconds, and those at its best and at its worst."""

    name: str
    seconds: float
    seconds_low: float
    seconds_high: float
    because: str


class TimeEstimate(Value):
    """How long the training takes, from speeds, rows and the wire. Each `*_because` says what it rests on.

    `step_s` is `compute_s` (the rank that ends last), `wire_s`, `wait_s` for ranks that are not always as fast, and in a pipeline `fill_s`
    while its stages fill and drain; `wire_hidden_s` more are on the
    wire while ranks compute. `best_step_s` is the same if rows could be divided at will, `equal_step_s` with equal shares. Efficiencies are
    fractions of the sum of the ranks' speeds alone. `hours` is to the end, with the start (`start_s`, all parts of `start` together),
    saves and evaluations; None where the number of steps is not known. `wire_is_measured`: with as many ranks, or nothing
    goes over it; `wire_measured_ranks`: with how many (0: never, it is reckoned from bytes).
    Of a guess nine in ten lie from `_low` to `_high`; None where speeds were measured.
    """

    is_measured: bool
    steps: int | None
    row_tokens: float
    rows_because: str
    compute_s: float
    wire_s: float
    wire_hidden_s: float = 0.0
    wire_because: str
    wire_is_measured: bool = False
    wait_s: float = 0.0
    fill_s: float = 0.0
    wire_measured_ranks: int = 0
    step_s: float
    best_step_s: float
    equal_step_s: float
    tokens_per_s: float
    tokens_per_s_low: float | None = None
    tokens_per_s_high: float | None = None
    efficiency: float
    equal_efficiency: float
    save_s: float
    evaluate_s: float
    start_s: float = 0.0
    start_s_low: float = 0.0
    start_s_high: float = 0.0
    start: tuple[StartPart, ...] = ()
    hours: float | None
    hours_low: float | None = None
    hours_high: float | None = None
    ranks: tuple[RankTime, ...]
    gains: tuple[NodeGain, ...]
    verdict: tuple[str, ...] = ()


class StrategyCost(Value):
    """What one strategy would cost on these machines: what the rank that holds most needs for weights, gradient and optimizer, bytes and seconds
    per step. `sent_bytes`: what a rank sends, and as much comes back.

    `without_room`: nodes that lack memory. `refused`: why it cannot train this recipe; then nothing else is known.
    """

    name: str
    state_bytes: int | None = None
    without_room: tuple[str, ...] = ()
    sent_bytes: int | None = None
    wire_s: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    refused: str | None = None


class Plan(Value):
    """Who does what in one attempt of a run. `left_out_because`: why a node of the cluster is not in it, where a recovery left it out."""

    run: str
    attempt: int
    world_size: int
    backend: str  # nccl | gloo
    device: str  # cuda | cpu
    precision: str  # bf16 | fp16 | fp32
    strategy: str  # of homelab.controller.planning.strategy.registry
    strategy_by_hand: StrategyName | None = None
    """What a person named at a recovery in place of the recipe's (`homelab recover --strategy`): later attempts keep it. None: the recipe's counts."""
    head: str
    master_address: str
    master_port: int
    resume_step: int
    resume_digest: str = ""
    """Of the state of the checkpoint to go on from (`homelab.shared.protocol.checkpoint_copies`); empty where that is not known."""
    checkpoint_layout: Literal["replicated", "sharded"] = "replicated"
    """Of the strategy: what each rank saves (`homelab.shared.protocol.checkpoint_holders`)."""
    ranks: tuple[RankPlan, ...]
    nodes: tuple[NodePlan, ...]
    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    left_out_because: dict[str, str] = {}
    fewer: FewerNodes | None = None
    """The plan's own advice: these nodes are faster without the others, or the others cannot do what the recipe asks for."""
    balance: str = "fixed"  # measured | fixed
    time: TimeEstimate | None = None
    strategies: tuple[StrategyCost, ...] = ()
    """The prices of all strategies, in the order in which they are considered; empty for a script and for one rank."""
    launch: LaunchSpec | None = Field(default=None, exclude=True)
    """What is started, until a launcher has rendered it: then every node has its command and its whole environment instead."""
    document: LaunchDocument | None = Field(default=None, exclude=True)
    """Of a launcher that starts all nodes with one text; None where each node has its own command."""

    @property
    def placement(self) -> Placement:
        """Where it runs."""
        return Placement(
            run=self.run, attempt=self.attempt, master_address=self.master_address, master_port=self.master_port, nodes=self.nodes
        )

    @property
    def step_s(self) -> float | None:
        """Seconds of an optimizer step, as expected; None where nothing is known of it."""
        return self.time.step_s if self.time else None

    @property
    def fits(self) -> bool | None:
        """Whether all ranks fit; None where that is not known of all of them."""
        answers = [rank.memory.fits if rank.memory else None for rank in self.ranks]
        return False if False in answers else None if None in answers else True

    def node(self, name: str) -> NodePlan:
        """The part of this node; KeyError when it has none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

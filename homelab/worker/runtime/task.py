"""What this process has to do: the run, the plan of this attempt and this rank, read from the run folder and the environment.

Nothing else is input: run.json (what never changes), attempts/<n>/plan.json (who computes what), HOMELAB_RUN_DIR, HOMELAB_ATTEMPT,
HOMELAB_NODE, and torchrun's RANK, WORLD_SIZE and LOCAL_RANK (without them: one process).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from homelab.shared.law import model_chance
from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed
from homelab.shared.law.stage import Stage
from homelab.shared.law.streaming import Streaming
from homelab.shared.protocol import layout
from homelab.shared.recipe import Checkpoint, Data, Method, Model, Objective, Parallel, Tracking, Train
from homelab.worker.balancing.balancer import Balance
from homelab.worker.errors import WorkerError
from homelab.worker.runtime.recipe import section
from homelab.worker.runtime.switches import Switches

S = TypeVar("S")


@dataclass(frozen=True)
class Rank:
    """One rank of the plan. `token_cap` None: rows of any length. `speed` and `memory` as the plan has them; None: not known.

    `stage`: what it holds of a pipeline; None: it is no part of one. `streaming`: which of its layers come from the host; None: none of them."""

    rank: int
    node: str
    local_rank: int = 0
    share: int = 0
    micro_batch: int = 1
    device_name: str = ""
    card: str | None = None
    token_cap: int | None = None
    speed: Mapping[str, float] | None = None
    memory: Mapping[str, Any] | None = None
    stage: Mapping[str, Any] | None = None
    streaming: Mapping[str, Any] | None = None


def _section(kind: type[S]) -> cached_property[S]:
    """This section of the run's recipe, as a property of `Task`."""
    return cached_property(lambda task: section(kind, task.run["recipe"]))


@dataclass(frozen=True)
class Task:
    """One rank's part of one attempt. `run` and `plan` are the two files as read; the properties are what the worker uses of them."""

    run_dir: Path
    attempt: int
    node: str
    rank: int
    local_rank: int
    world_size: int
    run: dict[str, Any]
    plan: dict[str, Any]

    model = _section(Model)
    data = _section(Data)
    method = _section(Method)
    train = _section(Train)
    parallel = _section(Parallel)
    checkpoint = _section(Checkpoint)
    tracking = _section(Tracking)

    @cached_property
    def objective(self) -> Objective | None:
        """What is learned from pairs of answers; None: the next token is."""
        return section(Objective, self.run["recipe"]) if self.run["recipe"].get("objective") else None

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks of the plan, in their order."""
        names = [field.name for field in dataclasses.fields(Rank)]
        ranks = (Rank(**{name: entry[name] for name in names if name in entry}) for entry in self.plan["ranks"])
        return tuple(sorted(ranks, key=lambda rank: rank.rank))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of every rank."""
        return tuple(rank.node for rank in self.ranks)

    @property
    def recipe_hash(self) -> str:
        """Fingerprint of what decides the training (recipe and data)."""
        return str(self.run["recipe_hash"])

    @property
    def draws_by_layer(self) -> bool:
        """Whether each layer begins its own random numbers; not in a run that an older version began."""
        return bool(self.run.get(model_chance.DRAWS_KEY) == model_chance.DRAWS)

    @property
    def shares(self) -> tuple[int, ...]:
        """Rows of every full global batch for each rank."""
        return tuple(rank.share for rank in self.ranks)

    def balance(self) -> Balance:
        """The assignment rule that this attempt starts with."""
        limits = [
            Limits.planned(rank.micro_batch, rank.token_cap, seq_len=self.train.seq_len, asked=self.parallel.micro_batch)
            for rank in self.ranks
        ]
        speeds = [Speed(**rank.speed) if rank.speed else None for rank in self.ranks]
        return Balance(
            self.shares, limits, [self.named(rank.rank) for rank in self.ranks], speeds, measured=self.plan.get("balance") == "measured"
        )

    def named(self, *ranks: int) -> str:
        """`rank 0 (tower), rank 1 (laptop)` for these."""
        return ", ".join(f"rank {rank} ({self.nodes[rank]})" for rank in ranks)

    @property
    def switches(self) -> Switches:
        """The optimisations that are on. They do not change the training."""
        return Switches(**self.plan.get("switches", {}))

    @property
    def precision(self) -> str:
        """fp32, bf16 or fp16: the plan's choice, the same on every rank."""
        return str(self.plan["precision"])

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return str(self.plan["device"])

    @property
    def backend(self) -> str:
        """nccl or gloo."""
        return str(self.plan["backend"])

    @property
    def strategy(self) -> str:
        """How the training is spread over the ranks."""
        return str(self.plan["strategy"])

    @property
    def stage(self) -> Stage | None:
        """The layers of this rank in a pipeline; None with any other strategy."""
        stage = self.ranks[self.rank].stage
        return None if stage is None else Stage(count=self.world_size, **stage)

    @property
    def streaming(self) -> Streaming | None:
        """Which layers of this rank come from its host; None where all are on its device."""
        streaming = self.ranks[self.rank].streaming
        return None if streaming is None else Streaming(*(streaming[name] for name in ("layers", "group", "host", "places")))

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """In a pipeline, the rank of each stage, from the first to the last."""
        return tuple(sorted((rank.rank for rank in self.ranks), key=lambda rank: (self.ranks[rank].stage or {}).get("number", rank)))

    @property
    def resume_step(self) -> int:
        """Optimizer steps that a checkpoint already holds; 0: from the start."""
        return int(self.plan["resume_step"])

    @property
    def is_keeper(self) -> bool:
        """Whether this rank writes what is kept once per folder: checkpoints, the best weights, speeds. Each node has a folder of its own, but
        that of an exported job is one for all."""
        return self.rank == 0 if self.plan.get("shared_folder") else self.local_rank == 0

    @property
    def save_request(self) -> Path:
        """The file that lies there while this node is asked for a checkpoint (`homelab.node.run.save_request`)."""
        return self.run_dir / layout.save_request(self.attempt, self.node)

    @property
    def rank_dir(self) -> Path:
        """Where this rank writes its metrics, heartbeat, samples and error."""
        return self.run_dir / layout.rank(self.attempt, self.rank)

    @property
    def checkpoints_dir(self) -> Path:
        return self.run_dir / layout.CHECKPOINTS

    @property
    def final_dir(self) -> Path:
        return self.run_dir / layout.FINAL


def load_task(environment: Mapping[str, str]) -> Task:
    """Read and cross-check everything a rank needs. Raises WorkerError when a variable, a file or a key is missing or contradicts another."""
    missing = [name for name in ("HOMELAB_RUN_DIR", "HOMELAB_ATTEMPT", "HOMELAB_NODE") if not environment.get(name)]
    if missing:
        raise WorkerError(
            f"the worker was started without {', '.join(missing)}",
            where="environment",
            hint="start runs with `homelab launch`; commands.sh in the run folder shows the whole command",
        )
    run_dir = Path(environment["HOMELAB_RUN_DIR"])
    attempt = int(environment["HOMELAB_ATTEMPT"])
    rank = int(environment.get("RANK", "0"))
    plan_file = run_dir / layout.plan_json(attempt)
    task = Task(
        run_dir=run_dir,
        attempt=attempt,
        node=environment["HOMELAB_NODE"],
        rank=rank,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        run=_read(run_dir / layout.RUN_JSON, ("recipe", "recipe_hash", "data")),
        plan=_read(plan_file, ("world_size", "backend", "device", "precision", "strategy", "resume_step", "ranks")),
    )
    _check(task, plan_file)
    return task


def _read(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    again = "stop the run and launch it again: the file is written by `homelab launch`"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkerError(f"cannot read {path.name}: {error.strerror}", where=str(path), hint=again) from error
    except ValueError as error:
        raise WorkerError(f"{path.name} is not JSON: {error}", where=str(path), hint=again) from error
    missing = [key for key in keys if key not in content]
    if missing:
        raise WorkerError(f"{path.name} lacks {', '.join(missing)}", where=str(path), hint=again)
    return content


def _check(task: Task, plan_file: Path) -> None:
    hint = "the plan and the command belong together: launch again, or run `homelab recover`"
    numbers = [rank.rank for rank in task.ranks]
    if task.world_size != task.plan["world_size"] or numbers != list(range(task.world_size)):
        planned = f"{task.plan['world_size']} processes, ranks {numbers}"
        raise WorkerError(f"torchrun started {task.world_size} processes, the plan says {planned}", where=str(plan_file), hint=hint)
    if task.nodes[task.rank] != task.node:
        message = f"rank {task.rank} runs on node {task.node}, the plan puts it on {task.nodes[task.rank]}"
        raise WorkerError(message, where=str(plan_file), hint=hint)
    for kind in (Model, Data, Method, Train, Parallel, Checkpoint, Tracking):
        section(kind, task.run["recipe"], str(task.run_dir / layout.RUN_JSON), whole=kind in (Model, Data, Method, Train))
    if task.run["recipe"].get("objective"):
        section(Objective, task.run["recipe"], str(task.run_dir / layout.RUN_JSON), whole=True)
    batch = task.train.global_batch
    if sum(task.shares) != batch or min(task.shares) < 0:
        raise WorkerError(f"the shares {list(task.shares)} do not add up to global_batch {batch}", where=str(plan_file), hint=hint)

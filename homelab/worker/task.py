"""What this process has to do: the run, the plan of this attempt and this rank, read from the run folder and the environment.

Nothing else is input: run.json (what never changes), attempts/<n>/plan.json (who computes what), HOMELAB_RUN_DIR, HOMELAB_ATTEMPT,
HOMELAB_NODE, and torchrun's RANK, WORLD_SIZE and LOCAL_RANK (without them: one process).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.worker.balance import Balance
from homelab.worker.errors import WorkerError
from homelab.worker.sampler import Limits
from homelab.worker.speed import Speed
from homelab.worker.switches import Switches


@dataclass(frozen=True)
class Task:
    """One rank's part of one attempt. `run` and `plan` are the two files as read; the properties name what is used of them."""

    run_dir: Path
    attempt: int
    node: str
    rank: int
    local_rank: int
    world_size: int
    run: dict[str, Any]
    plan: dict[str, Any]

    def section(self, name: str) -> dict[str, Any]:
        """A section of the resolved recipe, e.g. section("train")["learning_rate"]."""
        return self.run["recipe"][name]

    @property
    def recipe_hash(self) -> str:
        """Fingerprint of what decides the training (recipe and data)."""
        return self.run["recipe_hash"]

    @property
    def seed(self) -> int:
        return int(self.section("train")["seed"])

    @property
    def shares(self) -> tuple[int, ...]:
        """Rows of every full global batch for each rank, in rank order."""
        return tuple(int(entry["share"]) for entry in sorted(self.plan["ranks"], key=lambda entry: entry["rank"]))

    def balance(self) -> Balance:
        """The assignment rule that this attempt starts with."""
        entries = sorted(self.plan["ranks"], key=lambda entry: entry["rank"])
        seq_len, asked = int(self.section("train")["seq_len"]), self.section("parallel").get("micro_batch", "auto")
        limits, speeds = [], []
        for entry in entries:
            cap, speed = entry.get("token_cap"), entry.get("speed")
            tokens = int(entry["micro_batch"]) * seq_len if cap is None else int(cap)
            # A number in the recipe counts rows; "auto" is what memory takes, and memory counts tokens.
            limits.append(Limits(tokens, None if asked == "auto" else int(entry["micro_batch"]), cap))
            speeds.append(Speed(**speed) if speed else None)
        names = [f"rank {entry['rank']} ({entry['node']})" for entry in entries]
        return Balance(self.shares, limits, names, speeds, measured=self.plan.get("balance") == "measured")

    @property
    def switches(self) -> Switches:
        """What is on of all that only makes a step cheaper."""
        return Switches(**self.plan.get("switches", {}))

    @property
    def precision(self) -> str:
        """fp32, bf16 or fp16: the plan's choice, the same on every rank."""
        return self.plan["precision"]

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.plan["device"]

    @property
    def resume_step(self) -> int:
        """Optimizer steps that a checkpoint already holds; 0: from the start."""
        return int(self.plan["resume_step"])

    @property
    def rank_dir(self) -> Path:
        """Where this rank writes its metrics, heartbeat, samples and error."""
        return self.run_dir / "attempts" / str(self.attempt) / "ranks" / str(self.rank)

    @property
    def checkpoints_dir(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def final_dir(self) -> Path:
        return self.run_dir / "final"


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
    plan_file = run_dir / "attempts" / str(attempt) / "plan.json"
    task = Task(
        run_dir=run_dir,
        attempt=attempt,
        node=environment["HOMELAB_NODE"],
        rank=rank,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        run=_read(run_dir / "run.json", ("recipe", "recipe_hash", "data")),
        plan=_read(plan_file, ("world_size", "backend", "device", "precision", "resume_step", "ranks")),
    )
    _check(task, plan_file)
    return task


def _read(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    again = "stop the run and launch it again: the file is written by `homelab launch`"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkerError(f"cannot read {path.name}: {error.strerror}", where=str(path), hint=again) from error
    except ValueError as error:
        raise WorkerError(f"{path.name} is not JSON: {error}", where=str(path), hint=again) from error
    missing = [key for key in keys if key not in content]
    if missing:
        raise WorkerError(f"{path.name} lacks {', '.join(missing)}", where=str(path), hint=again)
    return content


def _check(task: Task, plan_file: Path) -> None:
    ranks = {entry["rank"]: entry for entry in task.plan["ranks"]}
    hint = "the plan and the command belong together: launch again, or run `homelab recover`"
    if task.world_size != task.plan["world_size"] or sorted(ranks) != list(range(task.world_size)):
        planned = f"{task.plan['world_size']} processes, ranks {sorted(ranks)}"
        raise WorkerError(
            f"torchrun started {task.world_size} processes, the plan says {planned}", where=str(plan_file), hint=hint
        )
    if ranks[task.rank]["node"] != task.node:
        seen = f"rank {task.rank} runs on node {task.node}, the plan puts it on {ranks[task.rank]['node']}"
        raise WorkerError(seen, where=str(plan_file), hint=hint)
    for section in ("model", "data", "method", "train", "checkpoint", "tracking"):
        if not isinstance(task.run["recipe"].get(section), dict):
            raise WorkerError(f"the recipe has no [{section}]", where=str(task.run_dir / "run.json"), hint=hint)
    batch = int(task.section("train")["global_batch"])
    if sum(task.shares) != batch or min(task.shares) < 0:
        raise WorkerError(
            f"the shares {list(task.shares)} do not add up to global_batch {batch}", where=str(plan_file), hint=hint
        )

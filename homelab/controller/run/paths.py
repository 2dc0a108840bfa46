"""RunPaths: where everything of a run lies on the controller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from homelab.shared.protocol import layout, profile_files


class _Below:
    """The path of this name below the folder of the run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, kind: type[RunPaths]) -> Path:
        return paths.root / self._name


@dataclass(frozen=True)
class RunPaths:
    """Paths below one run's folder on the controller."""

    root: Path

    @property
    def name(self) -> str:
        """The run's name is its folder's name."""
        return self.root.name

    run_json = _Below(layout.RUN_JSON)  # what never changes: resolved recipe, data digests, versions
    adopted_json = _Below("adopted.json")  # which nodes said what the run is, where this machine did not launch it; absent where it did
    cluster_json = _Below("cluster.json")  # the cluster as it was at launch
    plan_txt = _Below("plan.txt")  # the newest plan, for people
    commands_sh = _Below("commands.sh")  # what was executed on each node, runnable by hand, secrets masked
    events_jsonl = _Below(layout.EVENTS_JSONL)  # what happened, one JSON object per line
    state_json = _Below("state.json")  # the state as the controller last saw it
    metrics_jsonl = _Below(layout.METRICS_JSONL)  # metrics of all ranks, gathered from the nodes
    answers_jsonl = _Below("answers.jsonl")  # what `homelab chat --prompt` asked the run's model, and what it said
    energy_json = _Below(layout.ENERGY_JSON)  # attempt -> node -> what its cards used, as the nodes said it last
    readme_txt = _Below("README.txt")  # what each file of this folder is
    checks_json = _Below("preflight.json")  # the preflight results this run was started with
    supervisor_json = _Below(layout.SUPERVISOR_JSON)  # what the supervisor is doing, and the restarts it has made
    supervisor_lock = _Below(layout.SUPERVISOR_LOCK)  # held by the one supervisor of this run; the kernel drops it when its holder dies
    supervisor_log = _Below(layout.SUPERVISOR_LOG)  # what the supervisor said
    supervised_json = _Below("supervised.json")  # on which node the supervisor is, where it is not on this machine
    code = _Below(layout.CODE)  # snapshot of the recipe file and of a [script]
    profiles = _Below(profile_files.PROFILES)  # the profiles of some steps, a folder for each rank, as `homelab profile` has fetched them
    tracking = _Below("tracking")  # what trackers got of the run: TensorBoard's event files, and a file of state for each other tracker

    @property
    def event_files(self) -> Path:
        """Folder of TensorBoard's event files that are written here; TensorBoard shows its name."""
        return self.tracking / "tensorboard" / self.name

    def attempt(self, number: int) -> Path:
        """Folder of one start of torchrun on all nodes."""
        return self.root / layout.attempt(number)

    def plan_json(self, number: int) -> Path:
        """Who computes what in this attempt."""
        return self.root / layout.plan_json(number)

    def diagnosis_json(self, number: int) -> Path:
        """Why this attempt failed, as far as the controller learned it; absent where it did not."""
        return self.attempt(number) / "diagnosis.json"

    def node(self, number: int, node: str) -> Path:
        """What one node left in this attempt: exit.json, out.log, err.log."""
        return self.root / layout.nodes(number) / node

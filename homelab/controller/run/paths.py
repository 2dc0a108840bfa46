"""RunPaths: where everything of a run lies on the controller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from homelab.shared.protocol import layout, profile_files


@dataclass(frozen=True)
class RunPaths:
    """Paths below one run's folder on the controller."""

    root: Path

    @property
    def name(self) -> str:
        """The run's name is its folder's name."""
        return self.root.name

    @property
    def run_json(self) -> Path:
        """What never changes: resolved recipe, data digests, versions."""
        return self.root / layout.RUN_JSON

    @property
    def adopted_json(self) -> Path:
        """Which nodes said what the run is, where this machine did not launch it; absent where it did."""
        return self.root / "adopted.json"

    @property
    def cluster_json(self) -> Path:
        """The cluster as it was at launch."""
        return self.root / "cluster.json"

    @property
    def plan_txt(self) -> Path:
        """The newest plan, for people."""
        return self.root / "plan.txt"

    @property
    def commands_sh(self) -> Path:
        """What was executed on each node, runnable by hand, secrets masked."""
        return self.root / "commands.sh"

    @property
    def events_jsonl(self) -> Path:
        """What happened, one JSON object per line."""
        return self.root / layout.EVENTS_JSONL

    @property
    def state_json(self) -> Path:
        """The state as the controller last saw it."""
        return self.root / "state.json"

    @property
    def metrics_jsonl(self) -> Path:
        """Metrics of all ranks, gathered from the nodes."""
        return self.root / layout.METRICS_JSONL

    @property
    def answers_jsonl(self) -> Path:
        """What `homelab chat --prompt` asked the run's model, and what it said."""
        return self.root / "answers.jsonl"

    @property
    def energy_json(self) -> Path:
        """Attempt -> node -> what its cards used, as the nodes said it last."""
        return self.root / layout.ENERGY_JSON

    @property
    def readme_txt(self) -> Path:
        """What each file of this folder is."""
        return self.root / "README.txt"

    @property
    def checks_json(self) -> Path:
        """The preflight results this run was started with."""
        return self.root / "preflight.json"

    @property
    def supervisor_json(self) -> Path:
        """What the supervisor is doing, and the restarts it has made."""
        return self.root / layout.SUPERVISOR_JSON

    @property
    def supervisor_lock(self) -> Path:
        """Held by the one supervisor of this run; the kernel drops it when its holder dies."""
        return self.root / layout.SUPERVISOR_LOCK

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor said."""
        return self.root / layout.SUPERVISOR_LOG

    @property
    def supervised_json(self) -> Path:
        """On which node the supervisor is, where it is not on this machine."""
        return self.root / "supervised.json"

    @property
    def code(self) -> Path:
        """Snapshot of the recipe file and of a [script]."""
        return self.root / layout.CODE

    @property
    def tracking(self) -> Path:
        """What trackers got of the run: TensorBoard's event files, and a file of state for each other tracker."""
        return self.root / "tracking"

    @property
    def event_files(self) -> Path:
        """Folder of TensorBoard's event files that are written here; TensorBoard shows its name."""
        return self.tracking / "tensorboard" / self.name

    @property
    def profiles(self) -> Path:
        """The profiles of some steps, a folder for each rank, as `homelab profile` has fetched them."""
        return self.root / profile_files.PROFILES

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

"""A training as a job whose machines a scheduler chooses: the same for every scheduler, without a name or an address."""

from __future__ import annotations

from homelab.controller.base.models import Value

MODULE = ("-m", "torch.distributed.run", "-m", "homelab.worker")
MOST_RETRIES = 3
SECRETS = "homelab-secrets"  # of Kubernetes, with the key HF_TOKEN


class ScheduledJob(Value):
    """What a scheduler has to know. Each of `nodes` machines starts `ranks_per_node` ranks; all see the job's folder at `at`."""

    name: str
    """Lower-case letters, digits and "-", at most 40: a name for all schedulers, for YAML and for a shell."""
    run: str
    nodes: int
    ranks_per_node: int
    vram_gb: float | None
    """Of the smallest card; None: the ranks compute on CPUs."""
    at: str
    python: str
    image: str | None
    environment: dict[str, str]
    needs_token: bool
    hours: int | None
    partition: str | None
    volume: str
    port: int
    notes: tuple[str, ...]

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every rank."""
        return {**self.environment, "HOMELAB_JOB": self.at, "HOMELAB_RUN": self.run}

    @property
    def shape(self) -> str:
        """`3 machines of 1 rank`."""
        return f"{self.nodes} machine{'s' if self.nodes > 1 else ''} of {self.ranks_per_node} rank{'s' if self.ranks_per_node > 1 else ''}"

    def comments(self, start: str) -> list[str]:
        """What a reader of the file has to know, as its first lines. `start`: the command that starts it."""
        texts = [
            f"{self.run}: a training of homelab on {self.shape}, made by `homelab export`.",
            f"Its folder must be at {self.at} on every machine, and shared by all. Start: {start}",
            f"The Python there needs requirements.txt of the folder: {self.python} -m pip install -r requirements.txt",
            *self.notes,
        ]
        return [f"# {line}" for text in texts for line in text.splitlines()]

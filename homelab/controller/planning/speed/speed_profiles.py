"""The files of measured speeds: which of them hold for this plan, and why the others do not.

Written by `homelab.worker.training.speed_profile` on each node. Without a file the speeds are guessed, and measured in the
first steps of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from homelab.controller.base.models import WireModel
from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.speed import measured_speed
from homelab.shared.law.speed import Speed
from homelab.shared.law.wire_bytes import BUCKET_MB

OLD_DAYS = 30
_DAY_S = 86_400.0
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MoreThanNothing = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MeasuredRun(WireModel):
    """What one run has measured of a rank in `steps` steps (see `homelab.shared.law.speed.Speed`)."""

    run: str
    strategy: str
    world_size: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    step_s: Seconds
    micro_batch_s: Seconds
    token_s: MoreThanNothing


class MeasuredRank(WireModel):
    """One rank's measured cost (see `homelab.shared.law.speed.Speed`), and what its card held beside torch's memory (see `homelab.worker.runtime.card_memory`).

    `runs`: what that cost rests on, the newest first.
    """

    local_rank: Annotated[int, Field(ge=0)]
    device_name: str = ""
    step_s: Seconds
    micro_batch_s: Seconds
    token_s: MoreThanNothing
    beside_torch_bytes: Annotated[int, Field(ge=0)] | None = None
    runs: tuple[MeasuredRun, ...] = ()

    @property
    def speed(self) -> Speed:
        """By the newest runs that have enough steps together: one short run says little on a machine that does other things, too."""
        return measured_speed.mean(self.runs) if self.runs else Speed(self.step_s, self.micro_batch_s, self.token_s)


class MeasuredMethod(WireModel):
    """What was trained."""

    kind: str
    base: str = "auto"
    rank: int
    targets: Literal["all-linear", "all-linear+experts"] | tuple[str, ...]


class MeasuredSync(WireModel):
    """The wire of a run with so many ranks, by this strategy: `sync_s` of a step when no rank waits for another, without what the backward pass hides;
    and `wait_s`, what a step takes beyond that and the slowest rank, because the speed of a rank varies.
    """

    strategy: str
    compress: str
    bucket_mb: float = BUCKET_MB
    world_size: Annotated[int, Field(ge=2)]
    sync_s: Seconds
    wait_s: Seconds = 0.0


class SpeedProfile(WireModel):
    """One node's file. `syncs`: what runs have measured of the wire, the newest with each strategy and number of ranks; `sync_s` that of the
    newest run, None: one rank alone."""

    model: str
    method: MeasuredMethod
    precision: str
    device: str
    gradient_checkpointing: bool
    fused_loss: bool = False
    backend: str = "transformers"
    compress: str = "none"
    bucket_mb: float = BUCKET_MB
    strategy: str = "ddp"
    torch: str
    measured_at: MoreThanNothing
    run: str = ""
    world_size: Annotated[int, Field(ge=1)]
    sync_s: Seconds | None = None
    syncs: tuple[MeasuredSync, ...] = ()
    save_s: Seconds | None = None
    evaluate_s: Seconds | None = None
    rows: Annotated[int, Field(ge=1)] | None = None
    row_tokens_mean: MoreThanNothing | None = None
    row_tokens_quantiles: tuple[MoreThanNothing, ...] = ()
    loss_part: Annotated[float, Field(gt=0, le=1)] | None = None
    data_sha256: str | None = None
    seq_len: int | None = None
    ranks: Annotated[tuple[MeasuredRank, ...], Field(min_length=1)]


def usable(
    recipe: TrainRecipe, nodes: Sequence[Node], facts: Mapping[str, Facts], device: str, precision: str
) -> tuple[dict[str, SpeedProfile], tuple[str, ...]]:
    """The files that can be used, by node, their ranks in the order of the cards; and a warning for each that is there and cannot."""
    profiles, warnings = {}, []
    for node in nodes:
        node_facts = facts.get(node.name)
        if node_facts is None or node_facts.speed_profiles is None or not node_facts.speed_profiles.found:
            continue
        file = _read(node_facts)
        reason = file if isinstance(file, str) else _mismatch(file, recipe, node_facts, device, precision)
        if reason is None:
            assert isinstance(file, SpeedProfile)
            profiles[node.name] = file.model_copy(update={"ranks": tuple(sorted(file.ranks, key=lambda rank: rank.local_rank))})
        else:
            warnings.append(
                f"{node.name}: its measured speeds are not used: {reason}. They are measured again in the first steps ({node_facts.speed_profiles.path})"
            )
    return profiles, tuple(warnings)


def _read(facts: Facts) -> SpeedProfile | str:
    """The file's content, or what is wrong with it."""
    assert facts.speed_profiles is not None
    if facts.speed_profiles.problem or facts.speed_profiles.content is None:
        return facts.speed_profiles.problem or "it is empty"
    if facts.speed_profiles.content.get("schema") != 1:
        return "another version of homelab wrote it"
    try:
        return SpeedProfile.model_validate(facts.speed_profiles.content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        return f"it is damaged: {'.'.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _mismatch(file: SpeedProfile, recipe: TrainRecipe, facts: Facts, device: str, precision: str) -> str | None:
    """Why the file does not hold for this plan; None when it does."""
    if facts.system.time is not None:
        age_days = (facts.system.time - file.measured_at) / _DAY_S  # both by the node's own clock
        if age_days > OLD_DAYS:
            return f"they are {age_days:.0f} days old"
    method, train = recipe.method, recipe.train
    adapters = method.kind != "full"
    compared = [
        ("model", file.model, recipe.model.name),
        ("method", file.method.kind, method.kind),
        ("base", file.method.base, method.base),
        ("LoRA rank", file.method.rank if adapters else 0, method.rank if adapters else 0),
        ("LoRA targets", _targets(file.method.targets) if adapters else "", _targets(method.targets) if adapters else ""),
        ("device", file.device, device),
        ("precision", file.precision, precision),
        ("gradient_checkpointing", file.gradient_checkpointing, train.gradient_checkpointing),
        ("fused_loss", file.fused_loss, bool(train.fused_loss)),
        ("backend", file.backend, "unsloth" if method.backend == "unsloth" else "transformers"),
    ]
    for name, then, now in compared:
        if then != now:
            return f"they were measured with another {name} ({_text(then)}, here {_text(now)})"
    torch = facts.python.packages.get("torch")
    if torch is not None and not _same_version(file.torch, torch):
        return f"they were measured with torch {file.torch}, and the node has {torch} now"
    names = [gpu.name for gpu in facts.gpu.cards] if device == "cuda" else [cpu_name(facts)]
    if [rank.local_rank for rank in sorted(file.ranks, key=lambda rank: rank.local_rank)] != list(range(len(names))):
        return f"they are of {len(file.ranks)} processes, and the node has {len(names)} now"
    for rank in file.ranks:
        if rank.device_name and rank.device_name != names[rank.local_rank]:
            return f"they were measured on another device ({rank.device_name}, now {names[rank.local_rank]})"
    return None


def cpu_name(facts: Facts) -> str:
    """How a plan names a node's processor."""
    return f"CPU, {facts.system.cpu_count} core{'s' if facts.system.cpu_count > 1 else ''}"


def _same_version(one: str, other: str) -> bool:
    """Whether two versions of torch are one; the part after "+" counts where both have it (packages from PyPI leave it out)."""
    first, second = one.partition("+"), other.partition("+")
    return first[0] == second[0] and (not first[2] or not second[2] or first[2] == second[2])


def _targets(targets: str | tuple[str, ...]) -> str:
    return targets if isinstance(targets, str) else ", ".join(sorted(targets))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

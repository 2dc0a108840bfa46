"""One model on several ranks, layer after layer (`homelab.worker.strategies.pipeline.stages`): only activations cross the wire. The curve is that of one process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from homelab.controller.planning.memory.scenario import NodesWithoutRoom
from homelab.controller.planning.model import families, sight
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.strategy import ranks, shares
from homelab.controller.planning.strategy.base import Assignment, Automatic
from homelab.controller.planning.strategy.divided import Divided, Fault
from homelab.controller.planning.strategy.pipeline import one_card, pipeline_plan, stage_memory, stage_time, streamed_rank
from homelab.controller.planning.strategy.pipeline.micro_batching import MicroBatching
from homelab.controller.planning.time import network_cost, step_time
from homelab.controller.planning.time.network_cost import NetworkCost
from homelab.controller.planning.types import Choice, FewerNodes, Plan, RankPlan, RankTime, TimeEstimate
from homelab.controller.planning.work.job import Job, TrainingJob
from homelab.controller.planning.work.speed_estimate import is_measured
from homelab.shared.law import usable
from homelab.shared.law.stage import ROUTER_LOSS_OFF, why_not_in_stages

_NUMBER = re.compile(r"(^|\.)\d+(\.|$)")  # of a layer


class Pipeline(Divided):
    """Every rank holds some of the layers."""

    name = "pipeline"
    cuts_layers = True

    def automatic(self, job: Job) -> Automatic:
        return "fallback" if job.machines.world_size > 1 else "never"

    def assign(self, job: Job) -> Assignment:
        """The layers of every rank; all of them on one that is alone, as after the others were lost. Raises InputError for what a pipeline does not
        train, DoesNotFit where no cut has room."""
        job = self.trainable(job)
        if job.machines.world_size == 1:
            return streamed_rank.alone(job) or ranks.whole_models(job)
        stages = pipeline_plan.fastest(job)
        planned = pipeline_plan.rank_plans(stages)
        saved = Choice(
            subject="checkpoints",
            value="whole",
            because="every node saves all of it, so any division and any strategy can continue from it",
        )
        reasons = (*pipeline_plan.choices(stages, planned), *(_unlike(job.shape) if job.shape else ()))
        return Assignment(planned, (job.workload.speeds.choice, *reasons, saved))

    def fault(self, job: TrainingJob) -> Fault | None:
        """What stages would change or cannot do."""
        return _of_stages(job)

    def step_bytes(self, job: TrainingJob, passes: int) -> int | None:
        """What crosses one boundary in a step: hidden states and their gradients, of all rows; and between the ends, the gradient of a table that both train."""
        if job.shape is None:
            return None
        train, rows = job.recipe.train, job.workload.rows
        tokens = sum(rows.lengths(train.global_batch, train.seq_len))
        messages = stage_memory.message_bytes(job.shape, job.recipe.method, job.precision, tokens)
        return 2 * (messages + stage_memory.table_bytes(job.shape, job.recipe))

    def wire_s(self, size_bytes: float, ranks: int, bytes_per_s: float) -> float:
        """Both directions at once: half of the bytes each way."""
        return size_bytes / 2 / bytes_per_s if ranks > 1 else 0.0

    def because(self, job: Job) -> str:
        if not isinstance(job, TrainingJob) or job.shape is None:
            return "the recipe says so"
        names = job.machines.names
        if job.machines.world_size == 1:
            return "one rank alone: nothing is divided"
        table_bytes = stage_memory.table_bytes(job.shape, job.recipe)
        size_bytes = (self.step_bytes(job, 1) or 0) - 2 * table_bytes
        wire = network_cost.wire_between(names, job.throughputs)
        text = f"each of {job.machines.world_size} ranks holds some of the {job.shape.layers} layers; {network_cost.bytes_text(size_bytes)} per step go to the next stage"
        text += f" at {wire}" if len(names) > 1 else ""
        if table_bytes:
            text += f", and {network_cost.bytes_text(table_bytes)} each way between the first and the last: embeddings that are the head, too, are on both"
        return text

    def moves_rows(self, job: Job) -> bool:
        """Every rank computes its layers of all rows; one that is alone has nothing cut."""
        return job.machines.world_size == 1

    def useless_nodes(self, job: Job) -> NodesWithoutRoom | None:
        """Those without room for a single layer."""
        fault = self.feasible(job)
        return fault if isinstance(fault, NodesWithoutRoom) else None

    def loaded_part(self, ranks: Sequence[RankPlan]) -> float:
        stages = [(rank.node, rank.stage) for rank in ranks if rank.stage is not None]
        held = [sum(stage.end - stage.begin for name, stage in stages if name == node) for node in {name for name, _ in stages}]
        return max(held) / stages[0][1].layers if stages else 1.0

    def compared(self, job: TrainingJob, time: TimeEstimate) -> tuple[str, ...]:
        """With the best card alone, which has in the host's memory what has no room on it."""
        card = one_card.fastest(job)
        return () if card is None or card.instead_of(time.tokens_per_s) else (card.against(time.tokens_per_s),)

    def fewer_nodes(self, job: TrainingJob, time: TimeEstimate) -> FewerNodes | None:
        """The best card alone, if it has room for the whole model."""
        card = one_card.fastest(job)
        return card.instead_of(time.tokens_per_s) if card is not None else None

    def ways_to_room(self, plan: Plan) -> str:
        """The cut is the one that leaves most room."""
        return "" if len(plan.ranks) == 1 else "use a smaller micro_batch, a shorter seq_len or one more machine"

    def seconds(self, job: TrainingJob, ranks: tuple[RankPlan, ...]) -> TimeEstimate | None:
        return time_estimate(job, self, ranks) if len(ranks) > 1 else super().seconds(job, ranks)


def _unlike(shape: Architecture) -> Iterator[Choice]:
    """What is counted as more than it is, because the plan has layers of one kind."""
    room = "which is more: their card has more room than it says"
    if shape.dense_layers:
        yield Choice(subject="layers without experts", value=str(shape.dense_layers), because=f"counted as if they had experts, {room}")
    if shape.delta is not None:
        because = "counted as the others, which keep a state and are larger: their card has more room than it says"
        yield Choice(subject="layers that attend", value=str(shape.attention_layers), because=because)


def _of_stages(job: TrainingJob) -> Fault | None:
    """What stages would change or cannot do."""
    recipe, shape, count = job.recipe, job.shape, job.machines.world_size
    config = job.config or {}
    text = config.get("text_config")
    reason = why_not_in_stages(text if isinstance(text, dict) else config)
    if reason is not None:
        return f"does not train this mixture of experts ({config.get('model_type')}): {reason}", f'{ROUTER_LOSS_OFF}; or strategy = "auto"'
    if shape is None and recipe.method.kind == "full" and config.get("model_type") in sight.SEEING:
        seen = "holds the language part alone of a model that sees, and what trains all weights keeps the other part, too"
        return seen, 'kind = "lora" or "qlora" in [method], or strategy = "zero3"'
    if shape is None:
        return _without_shape(job)
    if shape.equal is None:
        other = f"{shape.dense_layers} have no experts and are wider than those that a token takes"
        if shape.delta is not None:
            other = f"{shape.attention_layers} attend and are larger than the others, or have no experts"
        elif shape.wide is not None:
            other = f"{shape.attention_layers} see a window of tokens and are larger than the others"
        return f"is planned for equal layers: of the {shape.layers} of this model, {other}", 'strategy = "auto", or another [model] name'
    if count > shape.layers:
        return (
            f"needs at least one layer for every rank: the model has {shape.layers}, and there are {count} ranks",
            "leave nodes out with --nodes",
        )
    if isinstance(recipe.parallel.shares, dict) or recipe.parallel.shares == "equal":
        return "gives every row to every rank, so there are no shares of rows", 'shares = "auto"'
    targets = () if recipe.method.kind == "full" or isinstance(recipe.method.targets, str) else recipe.method.targets
    of_layers = [name for name in targets if name.rsplit(".", 1)[-1] not in usable.ENDS]
    if targets and not of_layers:
        return (
            f"needs something to train on every stage, and {' and '.join(targets)} {'is' if len(targets) == 1 else 'are'} at the ends of the model",
            '[method] targets with modules of the layers, too (q_proj), or strategy = "ddp"',
        )
    some = [name for name in of_layers if _NUMBER.search(name)] or _in_some_layers(shape, of_layers)
    if some:
        everywhere = "q_proj" if shape.delta is None else "o_proj and out_proj"
        return (
            f"needs something to train on every stage, and {' and '.join(some)} {'is' if len(some) == 1 else 'are'} only in some layers",
            (f'name the modules of every layer in [method] targets ({everywhere}), or strategy = "ddp"'),
        )
    return None


def _in_some_layers(shape: Architecture, targets: Sequence[str]) -> list[str]:
    """The targets, where one of the two kinds of layers of a model has none of them."""
    mlp = shape.block[len(shape.attention) :]
    kinds = [shape.block]
    if shape.delta is not None:
        kinds.append((*shape.delta.block(shape.hidden), *mlp))
    if shape.wide is not None:
        kinds.append(shape.all_wide.block)
    names = {target.rsplit(".", 1)[-1] for target in targets}
    known_names = {linear.name for kind in kinds for linear in kind}
    is_everywhere = all(any(linear.name in names for linear in kind) for kind in kinds)
    return [] if is_everywhere or not names & known_names else list(targets)  # a name that no layer has is refused elsewhere


def _without_shape(job: TrainingJob) -> Fault:
    """Why no formula counts the model, as far as its config.json says it."""
    config = job.config
    if config is None:
        return (
            "needs the shape of the model, which is not known here",
            "copy the model to the nodes: homelab setup RECIPE; or name another strategy",
        )
    if families.from_config(dict(config)) is not None:
        return (
            "needs to know what is trained in each layer, and no formula counts adapters on routed experts or their router",
            'targets = "all-linear" in [method] (attention and shared experts); or strategy = "auto"',
        )
    if config.get("model_type") in ("gemma4", "gemma4_text"):  # other known kinds lack a formula only where config.json is incomplete
        return (
            f"needs layers that take nothing but what the one before gives, and no formula counts this model of type {config.get('model_type')} so",
            'strategy = "zero3": it divides any model of transformers',
        )
    return (
        f"needs the shape of the model, and models of type {config.get('model_type', 'without a model_type')} are not known to the planner",
        'strategy = "zero3": it divides any model of transformers',
    )


def time_estimate(job: TrainingJob, strategy: NetworkCost, planned: Sequence[RankPlan]) -> TimeEstimate | None:
    """The time of these stages; None where no speed is known."""
    if job.shape is None or job.workload.speeds.speeds is None:
        return None
    stages = {rank.rank: rank.stage for rank in planned if rank.stage is not None}
    order = sorted(stages, key=lambda rank: stages[rank].number)
    layers, in_flight = [stages[rank].end - stages[rank].begin for rank in order], [stages[rank].in_flight for rank in order]
    batching = MicroBatching(job, planned[0].micro_batch, streams=any(rank.streaming for rank in planned))
    rows, sources, speeds, tokens = job.workload.rows, job.workload.speeds.sources, batching.speeds, sum(batching.passes)
    times = batching.times(order, layers, in_flight)
    fixed_s = max(speeds[rank].step_s * stages[rank].work for rank in order)
    compute_s = max(one.busy_s for one in times) + fixed_s
    passes_s = stage_time.step_s(times)
    without_wire_s = stage_time.step_s([dataclasses.replace(one, message_s=[0.0] * len(one.message_s)) for one in times])
    table_s = batching.table_s(order)
    step_s, wire_s = passes_s + table_s + fixed_s, passes_s + table_s - without_wire_s
    equal_s = stage_time.step_s(batching.times(order, shares.equal(batching.shape.layers, len(order)), in_flight)) + table_s + fixed_s
    alone = [tokens / speed.seconds(batching.passes) for speed in speeds]
    wire = network_cost.wire_between({rank.node for rank in planned}, job.throughputs)
    gathers_s = strategy.checkpoint_wire_s(job, len(order), wire.bytes_per_s) if len(job.machines.nodes) > 1 else 0.0
    save_s, evaluate_s = step_time.save_s_of(job, gathers_s), step_time.evaluate_s_of(job, sum(alone))
    steps, size_bytes = rows.steps(job.recipe), strategy.step_bytes(job, len(batching.passes)) or 0
    seconds = None if steps is None else step_time.whole_s(job, steps, step_s, save_s, evaluate_s)
    busy_s = {rank: one.busy_s for rank, one in zip(order, times, strict=True)}
    return TimeEstimate(
        is_measured=is_measured(sources.values()) and rows.is_measured, steps=steps, row_tokens=rows.tokens_mean,
        rows_because=rows.because, compute_s=compute_s, wire_s=wire_s, wire_hidden_s=max(0.0, strategy.wire_s(size_bytes, len(order), wire.bytes_per_s) - wire_s),
        wire_because=f"{network_cost.bytes_text(size_bytes)} go from stage to stage in a step, at {wire}; this is the part that passes do not hide",
        wire_is_measured=wire.is_measured, wire_measured_ranks=len(order) if wire.is_measured else 0, fill_s=max(0.0, without_wire_s + fixed_s - compute_s),
        step_s=step_s, best_step_s=tokens / sum(alone) + wire_s, equal_step_s=equal_s, tokens_per_s=tokens / step_s,
        efficiency=tokens / step_s / sum(alone), equal_efficiency=tokens / equal_s / sum(alone), save_s=save_s, evaluate_s=evaluate_s,
        hours=None if seconds is None else seconds / 3600,
        ranks=tuple(
            RankTime(rank=rank.rank, node=rank.node, source=sources[rank.node], alone_tokens_per_s=alone[rank.rank], tokens=tokens, busy_s=busy_s[rank.rank])
            for rank in planned
        ),
        gains=(),
    )  # fmt: skip

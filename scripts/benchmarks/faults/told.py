"""The records of a run: metrics, TensorBoard and the model card have every step once, on whichever node the head was."""

from __future__ import annotations

import json
import struct
from collections import Counter
from contextlib import ExitStack
from typing import Any

from benchmarks.faults import trackers
from benchmarks.faults.scene import Case, Scene

from homelab.controller.features.track import forwarder_lock
from homelab.controller.features.track.points import points_of
from homelab.controller.run import store
from scripts.practice import tiny_model

EVAL_EVERY = 50


def killed_thrice(scene: Scene) -> None:
    """A worker is killed, then the head loses its power for good, then a worker of the next head is killed."""
    ground = scene.ground
    tiny_model.write_jsonl(ground.desk.folder / "held.jsonl", tiny_model.chat_rows(24, seed=7))
    text = ground.recipe().replace('train = "chats.jsonl"', 'train = "chats.jsonl"\neval = "held.jsonl"')
    to = trackers.installed()
    trackers.keep_below(ground.desk.folder)
    ground.desk.write(
        "told.toml", text.replace("tensorboard = false", f"tensorboard = true\neval_every_steps = {EVAL_EVERY}\nto = {json.dumps(to)}")
    )
    scene.train("told.toml")
    first = scene.node(head=True)
    with scene.fault():
        scene.lab.fault(scene.node(head=False), "kill-worker")
    _trains_again(scene, 2)
    scene.lab.fault(first, "power-cut")
    _trains_again(scene, 3)
    scene.lab.fault(scene.run.node_names(3)[0], "kill-worker")
    scene.victim = f"{scene.victim}, {first}, {scene.run.node_names(3)[0]}"
    scene.finish()
    why = [*_metrics(scene), *_tensorboard(scene), *_card(scene), *_status(scene)]
    for tracker in to:
        why += _tracked(scene, tracker)
    assert not why, "; ".join(why)


def _trains_again(scene: Scene, attempt: int) -> None:
    """Wait until this attempt has done a few steps, less than an interval of checkpoints: the next fault loses them."""

    def trains() -> bool:
        begins = scene.run.plan(attempt).get("resume_step")
        return begins is not None and int(scene.run.heartbeat(attempt).get("step", 0)) >= begins + 3

    scene.until(trains, f"third step of attempt {attempt}", 180)


def _metrics(scene: Scene) -> list[str]:
    lines = [line for line in store.read_lines(scene.run.paths.metrics_jsonl) if line.get("kind") in ("train", "eval")]
    counted = Counter((line["kind"], line["rank"], line["step"]) for line in lines)
    twice = sorted(place for place, times in counted.items() if times > 1)
    done = {step for kind, rank, step in counted if (kind, rank) == ("train", 0)}
    evaluated = {step for kind, _, step in counted if kind == "eval"}
    return [
        *([f"metrics.jsonl has {len(twice)} lines twice: {twice[:3]}"] if twice else []),
        *_differences("metrics.jsonl", done, set(range(1, scene.ground.steps + 1))),
        *_differences("the evaluations of metrics.jsonl", evaluated, _evaluated(scene)),
    ]


def _tensorboard(scene: Scene) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(scene.run.folder(_head(scene)) / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    why = []
    for tag, expected in (("train/loss", range(1, scene.ground.steps + 1)), ("eval/loss", sorted(_evaluated(scene)))):
        steps = [event.step for event in reader.Scalars(tag)]
        if steps != list(expected):
            why += [f"TensorBoard has {len(steps)} points of {tag} for {len(expected)} steps"]
            why += _differences("TensorBoard", set(steps), set(expected))
    return why


def _tracked(scene: Scene, tracker: str) -> list[str]:
    """What it has got, once its forwarder has ended: every point once, as in metrics.jsonl."""
    paths = scene.run.paths
    wanted = [(point.step, dict(point.values)) for point in points_of(store.read_lines(paths.metrics_jsonl))]
    free = ExitStack()
    with free:
        scene.until(lambda: free.enter_context(forwarder_lock.held(paths, tracker)), f"end of the forwarder to {tracker}", 60)
    rows = trackers.read(tracker, scene.ground.desk.folder, paths)
    if tracker == "tensorboard":  # which keeps single precision
        rows, wanted = ([(step, {tag: _single(value) for tag, value in row.items()}) for step, row in both] for both in (rows, wanted))
    if rows == wanted:
        return []
    differing = next((step for (step, row), other in zip(rows, wanted, strict=False) if (step, row) != other), None)
    return [f"{tracker} has {len(rows)} points for {len(wanted)}; the first that differs: step {differing}"]


def _single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _card(scene: Scene) -> list[str]:
    folder = scene.run.folder(_head(scene))
    card = (folder / "final" / "README.md").read_text(encoding="utf-8")
    expected = (
        "step 0 (before training)",
        "training, first step (1)",
        f"training, last step ({scene.ground.steps})",
        "- train: `chats.jsonl`",
    )
    rows = sum(line.startswith("| held-out rows") for line in card.splitlines())
    named = [str(place) for place in (folder.parents[1], scene.ground.model.parent) if str(place) in card]
    return [
        *(f"the model card lacks {text!r}" for text in expected if text not in card),
        *(f"the model card names {place}" for place in named),
        *([f"the model card has {rows} rows of held-out losses"] if rows > 10 else []),
    ]


def _status(scene: Scene) -> list[str]:
    status: dict[str, Any] = scene.ground.desk.json("status", scene.run.name, timeout_s=90)
    losses = [point["step"] for point in status["eval_losses"]]
    is_right = status["loss"] is not None and losses[:1] == [0] and losses[-1:] == [scene.ground.steps]
    return [] if is_right else [f"status shows the loss {status['loss']} and evaluations at {losses}"]


def _evaluated(scene: Scene) -> set[int]:
    return {0, scene.ground.steps, *range(EVAL_EVERY, scene.ground.steps, EVAL_EVERY)}


def _head(scene: Scene) -> str:
    return scene.run.node_names(scene.run.attempt())[0]


def _differences(what: str, found: set[int], expected: set[int]) -> list[str]:
    missing, odd = sorted(expected - found), sorted(found - expected)
    return [f"{what}: {len(steps)} {word}, as step {steps[0]}" for word, steps in (("missing", missing), ("too many", odd)) if steps]


CASES = (Case("killed-thrice", "three faults, one of the head; then what is told of it", "other", killed_thrice, restarts=(3, 4)),)

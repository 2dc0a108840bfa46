"""The records of a run: metrics, TensorBoard and the model card have every step once, on whichever node the head was."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.faults.scene import Case, Scene

from homelab.runs import store
from scripts.practice import tiny_model

EVAL_EVERY = 50


def killed_thrice(scene: Scene) -> None:
    """A worker is killed, then the head loses its power for good, then a worker of the next head is killed."""
    ground = scene.ground
    tiny_model.write_jsonl(ground.desk.folder / "held.jsonl", tiny_model.chat_rows(24, seed=7))
    text = ground.recipe().replace('train = "chats.jsonl"', 'train = "chats.jsonl"\neval = "held.jsonl"')
    ground.desk.write("told.toml", text.replace("tensorboard = false", f"tensorboard = true\neval_every_steps = {EVAL_EVERY}"))
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


def _card(scene: Scene) -> list[str]:
    folder = scene.run.folder(_head(scene))
    card = (folder / "final" / "README.md").read_text(encoding="utf-8")
    expected = ("step 0 (before training)", "training, first step (1)", f"training, last step ({scene.ground.steps})", "- train: `chats.jsonl`")
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

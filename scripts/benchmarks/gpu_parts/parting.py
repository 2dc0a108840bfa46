"""The save of a rank that is stopped while it waits, over NCCL, for a peer that died or froze; and the run that goes on from it.

The peer ends in its passes of step 5. Then who survives is told to end, as the node's program does. Nobody else saves anything after step 0.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from benchmarks.gpu_parts import divided, material, ranks
from benchmarks.gpu_parts.divided import Division
from benchmarks.gpu_parts.place import Place

_STEPS, _WHOLE = 8, 4  # the fault is in the step after the last whole one (`parting_peer`)
_LIMIT_S = 60.0
_SHARES = (8, 4)
_PRECISIONS = ("fp32", "bf16")


def measure(place: Place) -> None:
    """A dead peer and a frozen one, with weights of 32 and of 16 bits."""
    model = material.model(place.folder / "model", "small" if place.is_card else "tiny", "float32", place.device)
    data = material.rows(place.folder / "rows.jsonl", material.lengths(12 * _STEPS, 200))
    for precision in _PRECISIONS if place.is_card else ("fp32",):
        every = {"checkpoint__every_steps": 1, "checkpoint__keep": _STEPS}
        with place.attempt(f"reference, {precision}"):
            of = Division("reference", shares=_SHARES, recipe=every)
            expected = divided.train(place, of, model, data, precision, limit_s=_LIMIT_S, steps=_STEPS)
            for number, fault in ((signal.SIGKILL, "dead"), (signal.SIGSTOP, "frozen")):
                with place.attempt(f"{fault} peer, {precision}"):
                    _parts(place, fault, number, expected, model, data, precision)


def _parts(place: Place, fault: str, number: int, expected: Path, model: Path, data: Path, precision: str) -> None:
    from homelab.worker.checkpoints import checkpoint_folder

    key = f"{fault}_{precision}"
    recipe = {"train__steps": _STEPS, "train__precision": precision, "parallel__micro_batch": 2, "checkpoint__every_steps": 100}
    run = material.run(place.folder / key, model, data, **recipe)
    backend = "nccl" if place.is_card else "gloo"
    material.plan(run, 1, _SHARES, device=place.device, precision=precision, backend=backend)
    variables = (ranks.ALLOCATOR_OF_RUNS if place.is_card else {}) | {"BENCH_FAULT": str(number)}
    survivor, peer = ranks.worker(run, 1, 2, variables, ("-m", "benchmarks.gpu_parts.parting_peer"))
    deadline = time.monotonic() + _LIMIT_S * ranks.patience()
    while not (is_over := survivor.process.poll() is not None) and time.monotonic() < deadline and not _is_at_fault(run, peer):
        time.sleep(0.01)
    time.sleep(0.0 if is_over else 1.0)  # it waits in a collective by then
    waited = survivor.process.poll() is None
    began = time.monotonic()
    survivor.process.terminate()
    ranks.wait([survivor], 20, began)
    peer.process.kill()
    peer.process.wait()
    steps = checkpoint_folder.complete_steps(run / "checkpoints")
    parts = [_files(folder, _WHOLE) for folder in (run, expected)]
    place.run(f"{fault} peer, {precision}", saved=steps, code=survivor.code, was_waiting=waited, files=parts, words=survivor.words(800))
    place.figure(f"{key}_stop_to_end_s", survivor.seconds if survivor.seconds is not None else -1.0)
    place.gate(f"{key}_saves_the_last_whole_step", steps == [_WHOLE])
    if steps != [_WHOLE]:
        return
    place.gate(f"{key}_saves_the_same_files", parts[0] == parts[1])
    divided.begin(place, Division(key, shares=_SHARES), run, precision, 2, limit_s=_LIMIT_S, resume_step=_WHOLE)
    found = divided.losses(run, 2)
    place.run(f"{fault} peer, {precision}, goes on", losses=found, losses_of_the_whole=divided.losses(expected))
    place.figure(f"{key}_loss_apart", divided.apart(found, divided.losses(expected)))
    place.gate(f"{key}_goes_on", sorted(found) == list(range(_WHOLE + 1, _STEPS + 1)))
    material.remove(run, 2)


def _is_at_fault(run: Path, peer: ranks.Rank) -> bool:
    """The peer has died or frozen, after the survivor had finished the last whole step."""
    is_down = peer.process.poll() is not None or Path(f"/proc/{peer.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    return is_down and len(ranks.lines(run, 1, 0)) >= _WHOLE


def _files(run: Path, step: int) -> dict[str, str]:
    """Digest of each file of a checkpoint that is state: curves and times are not."""
    from homelab.worker.checkpoints import checkpoint_folder

    content = checkpoint_folder.read_manifest(run / "checkpoints" / f"step-{step:08d}")
    named = {} if content is None else {name: part["sha256"] for name, part in content["files"].items()}
    return {name: digest for name, digest in named.items() if name.endswith((".safetensors", ".pt"))}

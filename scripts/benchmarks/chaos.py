"""Does a supervised run survive the faults of a home cluster, and is it the same training afterwards as without a fault?

A lab of three nodes trains a small model with `homelab launch`; every case injects a fault at a random moment, and no person helps.

cases, survived        faults tried (not those for which this machine lacks a program: "not played"); runs that ended as they should (trained on, or refused where that is right)
weights_equal          runs that ended with the weights of the undisturbed run (relative difference <= 1e-5, fp32), of `trained`
exactly_once           runs that trained on every sample once per epoch, of `trained`
orphans                processes of a run that were still on a node 20 s after its end
detect_death_median_s  from the fault to the supervisor's first word, where a process or torchrun ended
detect_cut_median_s    the same where a node or a process became silent
resume_over_floor_median_s  from the fault to the next training step, less detection and the workers' own start
resume_standby_median_s  from the fault to the next training step, less detection, where the next attempt was prepared (case standby)
resume_cold_median_s   the same without (case cold)
lost_steps_survivors   most steps that were done again after a fault that left ranks with a whole state alive (cases LEAVE_SURVIVORS)
standby_step_cost      step beside processes that wait over step before them, in one run
false_alarms           undisturbed runs that were restarted although nothing had failed
save_overhead_percent  share of the undisturbed run's time that went into checkpoints

`--case NAME` (repeatable): these alone. `--seed N`: other moments and other nodes. `--repeats N`: each case with N seeds.
`--fast`: the most telling cases with a short training, in less than four minutes. `--soak MINUTES`: one long run instead, with a
random fault about every minute (figures soak_*). `--in-a-row N`: one long run, a worker of which is killed in each of N attempts
(the same figures: what the supervisor and the nodes hold must not grow).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.faults import catalogue, row, soak
from benchmarks.faults.ground import LIMIT_S, Ground, SeenRun, ground
from benchmarks.faults.scene import Case, Outcome, is_exactly_once, play
from rich.console import Console
from rich.table import Table

from homelab.controller.base.errors import did_you_mean

MOST_ALARMS = 4
LEAVE_SURVIVORS = ("worker-killed", "power-cut", "worker-frozen", "standby", "cold", "standby-killed", "standby-twice")


def main() -> int:
    """Play the cases. Returns 0 when all ended as they should."""
    options = _arguments()
    if options.list:
        for case in catalogue.ALL:
            print(f"{case.name:22} {case.title}")
        return 0
    names = [*options.case, *(catalogue.FAST if options.fast else ())]
    cases = [_find(name) for name in dict.fromkeys(names)] or list(catalogue.ALL)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the lab is taken down
    if options.soak is not None:
        return soak.main(options.soak, options.seed, options.json, options.keep)
    if options.in_a_row is not None:
        return row.main(options.in_a_row, options.seed, options.json, options.keep)
    outcomes: list[Outcome] = []
    runs: list[dict[str, Any]] = []
    epochs, every_steps = catalogue.FAST_LENGTH if options.fast else (options.epochs, options.every_steps)
    with ground(epochs, every_steps, keep=options.keep, strategy=options.strategy) as place:
        _say("the undisturbed run")
        place.reference = _undisturbed(place, runs)
        for seed in range(options.seed, options.seed + options.repeats):
            for case in cases:
                _say(f"seed {seed}, {case.name}: {case.title}")
                outcome = play(place, case, seed)
                outcomes.append(outcome)
                runs.append({"what": "case", **outcome.as_dict()})
                _say(f"  {_line(outcome)}")
                if outcome.why:
                    _explain(outcome)
                _keep(runs, options.json)
    return _finish(options, outcomes, runs)


def _finish(options: argparse.Namespace, outcomes: list[Outcome], runs: list[dict[str, Any]]) -> int:
    """Print and write what was measured. Returns 0 when all cases ended as they should."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(_table(outcomes))
    figures = _figures(outcomes) | {"false_alarms": float(len(runs[0]["false_alarms"]))}
    figures |= {"save_overhead_percent": runs[0]["save_overhead_percent"]}
    report.finish("chaos", figures, runs, _rows(outcomes), options.json)
    for outcome in outcomes:
        if outcome.missing:
            print(f"not played: {outcome.case}: {outcome.missing}", file=sys.stderr)
    return 0 if all(outcome.survived for outcome in outcomes if not outcome.missing) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="play this case alone (repeatable)")
    parser.add_argument("--fast", action="store_true", help="play the most telling cases, with a short training")
    parser.add_argument(
        "--soak", type=float, nargs="?", const=30.0, metavar="MINUTES",
        help="one run of about so many minutes, with a fault about every minute (30)",
    )  # fmt: skip
    parser.add_argument(
        "--in-a-row", type=int, nargs="?", const=50, metavar="N", help="one run, a worker of which is killed in N attempts (50)"
    )
    parser.add_argument("--strategy", default="auto", metavar="NAME", help="the recipe's [parallel] strategy (auto)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="chooses nodes and moments (1)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="every case with the seeds N, N + 1, ... (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and raw measurements here")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the controller's folders of all runs here")
    parser.add_argument("--epochs", type=int, default=30, metavar="N", help="length of the training: 20 steps each (30)")
    parser.add_argument("--every-steps", type=int, default=40, metavar="N", help="steps between checkpoints (40)")
    return parser.parse_args()


def _find(name: str) -> Case:
    for case in catalogue.ALL:
        if case.name == name:
            return case
    names = [case.name for case in catalogue.ALL]
    raise SystemExit(f'error: no case is called "{name}".{did_you_mean(name, names)}\nfix:   scripts/chaos --list')


def _keep(runs: list[dict[str, Any]], file: Path | None) -> None:
    """Write the results so far, so that an interruption loses none."""
    if file is not None:
        file.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _undisturbed(place: Ground, runs: list[dict[str, Any]]) -> SeenRun:
    """The run that all others are compared with; its own figures go first. One that was restarted for nothing is a false alarm."""
    alarms = []
    while True:
        run = place.launch()
        deadline = time.monotonic() + LIMIT_S
        while run.supervisor().get("doing") not in ("ended", "given up") and time.monotonic() < deadline:
            time.sleep(0.2)
        if run.supervisor().get("why") == "done" and run.attempt() == 1 and is_exactly_once(run, place.epochs):
            break
        alarms.append([event["what"] for event in run.events()])
        _say(f"  it did not end as it should: {run.supervisor()}: {alarms[-1]}")
        if len(alarms) == MOST_ALARMS:
            log = run.paths.supervisor_log.read_text(errors="replace")
            raise SystemExit(f"error: no undisturbed run ended as it should\n{log}\n{run.logs(run.attempt())}")
    times = run.train_times(1)
    ordered = [times[step] for step in sorted(times)]
    gaps = {step: later - earlier for step, earlier, later in zip(sorted(times)[1:], ordered, ordered[1:], strict=False)}
    plain = statistics.median(gap for step, gap in gaps.items() if (step - 1) % place.every_steps)
    saving = [max(0.0, gap - plain) for step, gap in gaps.items() if (step - 1) % place.every_steps == 0]
    seconds = ordered[-1] - ordered[0]
    first = run.started_at(1)
    runs.append({
        "what": "undisturbed", "false_alarms": alarms, "run": run.name, "seconds": seconds, "step_s": plain, "save_s": statistics.median(saving),
        "save_overhead_percent": 100 * sum(saving) / seconds, "worker_start_s": ordered[0] - first if first else None,
        "events": [event["what"] for event in run.events()],
    })  # fmt: skip
    _say(f"  {seconds:.0f} s, {plain:.3f} s a step, {statistics.median(saving):.2f} s a checkpoint, load {os.getloadavg()[0]:.1f}")
    return run


def _figures(outcomes: list[Outcome]) -> dict[str, float]:
    outcomes = [outcome for outcome in outcomes if not outcome.missing]
    trained = [outcome for outcome in outcomes if outcome.weights_equal is not None]
    figures = {
        "cases": float(len({outcome.case for outcome in outcomes})),
        "played": float(len(outcomes)),
        "survived": float(sum(outcome.survived for outcome in outcomes)),
        "trained": float(len(trained)),
        "weights_equal": float(sum(outcome.weights_equal is True for outcome in trained)),
        "exactly_once": float(sum(outcome.exactly_once is True for outcome in trained)),
        "orphans": float(sum(outcome.orphans for outcome in outcomes)),
    }
    for name, values in _measured(outcomes).items():
        if values:
            figures[f"{name}_median_s"] = statistics.median(values)
    if lost := [outcome.lost_steps for outcome in outcomes if outcome.case in LEAVE_SURVIVORS and outcome.lost_steps is not None]:
        figures["lost_steps_survivors"] = float(max(lost))
    if costs := [outcome.step_cost for outcome in outcomes if outcome.step_cost is not None]:
        figures["standby_step_cost"] = statistics.median(costs)
    return figures


def _measured(outcomes: list[Outcome]) -> dict[str, list[float]]:
    delays = [(outcome.kind, outcome.detect_s) for outcome in outcomes if outcome.detect_s is not None]
    return {
        "detect_death": [seconds for kind, seconds in delays if kind == "death"],
        "detect_cut": [seconds for kind, seconds in delays if kind == "cut"],
        "resume_over_floor": [o.over_floor_s for o in outcomes if o.over_floor_s is not None and o.kind in ("death", "cut")],
        "next_step": [o.next_step_s for o in outcomes if o.next_step_s is not None and o.restarts and o.kind in ("death", "cut")],
        "resume_standby": [o.resume_s for o in outcomes if o.case == "standby" and o.resume_s is not None],
        "resume_cold": [o.resume_s for o in outcomes if o.case == "cold" and o.resume_s is not None],
        "worker_start": [o.worker_start_s for o in outcomes if o.worker_start_s is not None],
    }


def _rows(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    return [(f"{name}, s", report.spread(values)) for name, values in _measured(outcomes).items() if values]


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("fault", "node", "survived"):
        table.add_column(heading, min_width=len(heading))
    for heading in ("detected s", "next step s", "over floor s", "steps lost", "restarts", "orphans"):
        table.add_column(heading, justify="right", min_width=len(heading.split()[0]))
    table.add_column("weights equal")
    table.add_column("each once")
    table.add_column("why not", overflow="fold", max_width=60)
    for one in outcomes:
        table.add_row(
            one.case, one.node, "not played" if one.missing else _word(one.survived), _seconds(one.detect_s), _seconds(one.next_step_s), _seconds(one.over_floor_s),
            "" if one.lost_steps is None else str(one.lost_steps), str(one.restarts), str(one.orphans), _word(one.weights_equal),
            _word(one.exactly_once), _short([one.missing] if one.missing else one.why), style="" if one.survived or one.missing else "red",
        )  # fmt: skip
    return table


def _short(why: list[str]) -> str:
    return "; ".join(" ".join(reason.split())[:90] for reason in why)


def _line(one: Outcome) -> str:
    if one.missing:
        return f"not played: {one.missing}"
    return (
        f"survived: {_word(one.survived)}, {one.node or 'no node'} at step {one.step}, detected {_seconds(one.detect_s)} s, next step"
        f" {_seconds(one.next_step_s)} s, worker start {_seconds(one.worker_start_s)} s, lost {one.lost_steps}, restarts {one.restarts},"
        f" orphans {one.orphans}, error {one.error}, once: {_word(one.exactly_once)}"
    )


def _explain(one: Outcome) -> None:
    for heading, lines in (("why", one.why), ("events", one.events), ("supervisor.log", one.log)):
        for line in lines:
            print(f"    {heading}: {line}", file=sys.stderr, flush=True)


def _word(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; the lab is down", file=sys.stderr)
        sys.exit(130)

"""Does preflight find what is wrong with a cluster, on the right node, and nothing where all is well; and how long does it take?

faults_injected, faults_found, right_node   misconfigurations really injected into a lab of three nodes (scripts/practice/misconfigurations);
                                            how many of them preflight found, and for how many every finding named their node
false_alarms          warnings and failures over three healthy clusters, each without and with a recipe
seconds_three_nodes   `homelab preflight` of three healthy nodes, the whole process; _deep: with the collective test
ratio_24_to_3         24 nodes over three, measured in turn
blocked_port_seconds  until preflight has reported a firewall that drops port 29500 on the head

`--only NAME` (repeatable): these misconfigurations alone, and no other figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.misconfigurations.trials import Seen, Trial, Trials, preflight
from rich.console import Console
from rich.table import Table

from homelab.controller.base.errors import HomelabError
from homelab.lab import Lab
from scripts.practice.misconfigurations import catalogue, network, training_files
from scripts.practice.misconfigurations.misconfiguration import Misconfiguration, NotInjectable

Runs = list[dict[str, Any]]
_RATE = "1gbit"
_SAID = 80  # columns for the first words of what was found


def main() -> int:
    """Measure, then inject misconfigurations. Returns 0 when all that was injected was found on the right node and nothing else was."""
    options = _arguments()
    chosen = [catalogue.find(name) for name in options.only] or list(catalogue.all_misconfigurations())
    if os.geteuid() != 0:
        raise SystemExit(
            "error: misconfigurations are injected into a lab of namespaces, which needs root\nfix:   sudo scripts/bench preflight"
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that everything is undone
    runs: Runs = []
    figures: dict[str, float] = {}
    rows: list[tuple[str, str]] = []
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    try:
        with _lab(folder / "three", 3) as lab:
            recipe = _recipe(lab)
            preflight(lab, recipe)  # ships the agent, compiles its byte code
            if not options.only:
                _times(lab, folder, max(3, options.repeats), figures, rows, runs)
                figures["false_alarms"] = float(_false_alarms(lab, folder, recipe, runs))
            trials = _try(lab, recipe, chosen, runs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    Console(width=None if sys.stdout.isatty() else 180).print(_table(trials))
    tried = [trial for trial in trials if trial.injected]
    figures |= {
        "faults_injected": float(len(tried)),
        "faults_found": float(sum(trial.found for trial in tried)),
        "right_node": float(sum(trial.found and trial.right_node for trial in tried)),
        "hints": float(sum(trial.hint for trial in tried)),
    }
    report.finish("preflight", figures, runs, rows, options.json)
    return 0 if all(trial.found and trial.right_node and trial.hint for trial in tried) and not figures.get("false_alarms") else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and raw measurements here")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of every measurement (at least 3)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="try this one alone (repeatable)")
    return parser.parse_args()


@contextlib.contextmanager
def _lab(place: Path, nodes: int, **options: Any) -> Iterator[Lab]:
    with Lab.up(place, nodes=nodes, backend="namespaces", rate=_RATE, **options) as lab:
        yield lab


def _recipe(lab: Lab) -> Path | None:
    try:
        return training_files.place(lab)
    except NotInjectable as error:
        print(f"without a recipe: {error}", file=sys.stderr)
        return None


def _times(lab: Lab, folder: Path, repeats: int, figures: dict[str, float], rows: list[tuple[str, str]], runs: Runs) -> None:
    """Seconds of preflight on healthy nodes, and seconds until it reports a blocked port."""
    plain = [_timed(lab, "three nodes", runs) for _ in range(repeats)]
    deep = [_timed(lab, "three nodes, deep", runs, deep=True) for _ in range(repeats)]
    few, many = [], []
    with _lab(folder / "many", 24) as crowd:
        preflight(crowd)
        for _ in range(repeats):
            few.append(_timed(lab, "three nodes, in turn with 24", runs))
            many.append(_timed(crowd, "24 nodes", runs))
    blocked = []
    blocked_port = catalogue.find("rendezvous-blocked")
    for _ in range(repeats):
        with blocked_port.inject(lab, lab.nodes[0].name):
            answer = preflight(lab)
        assert any(entry["check"] in blocked_port.checks for entry in answer.findings), answer
        blocked.append(answer.seconds)
        runs.append({"what": "port 29500 blocked", "seconds": answer.seconds})
    figures |= {
        "seconds_three_nodes": statistics.median(plain),
        "seconds_three_nodes_deep": statistics.median(deep),
        "ratio_24_to_3": statistics.median(many) / statistics.median(few),
        "blocked_port_seconds": statistics.median(blocked),
    }
    measured = {"three nodes": plain, "three nodes, deep": deep, "three nodes, in turn with 24": few, "24 nodes": many}
    measured |= {"port 29500 blocked": blocked}
    rows += [(f"{name}, s", report.spread(values)) for name, values in measured.items()]


def _timed(lab: Lab, what: str, runs: Runs, *, deep: bool = False) -> float:
    answer = preflight(lab, deep=deep)
    runs.append({"what": what, "seconds": answer.seconds, "findings": list(answer.findings), "error": answer.error})
    if answer.error:
        raise SystemExit(f"error: preflight of {what} gave no answer: {answer.error}")
    return answer.seconds


def _false_alarms(lab: Lab, folder: Path, recipe: Path | None, runs: Runs) -> int:
    """Warnings and failures over three healthy clusters; an answer that is none counts as one."""
    alarms = _alarms("three nodes", lab, recipe, runs)
    with contextlib.ExitStack() as stack:
        two = stack.enter_context(_lab(folder / "two", 2, names=("tower", "laptop")))
        # Docker on every machine is a normal home network.
        for node in two.nodes:
            stack.enter_context(network.bridge(two, node.name, "docker0", "172.17.0.1/16"))
        alarms += _alarms("two nodes with names, and with Docker", two, _recipe(two), runs)
    with _lab(folder / "five", 5, cpu=(0.9, 0.6, 0.5, 0.4, 0.3)) as five:
        alarms += _alarms("five nodes of unequal speed", five, _recipe(five), runs)
    return alarms


def _alarms(what: str, lab: Lab, recipe: Path | None, runs: Runs) -> int:
    answers: list[tuple[str, Seen]] = [(what, preflight(lab))]
    if recipe is not None:
        answers.append((f"{what}, with a recipe", preflight(lab, recipe)))
    for name, one in answers:
        runs.append({"what": f"healthy: {name}", "seconds": one.seconds, "findings": list(one.findings), "error": one.error})
        for entry in one.findings:
            print(f"false alarm, {name}: {entry['node']} {entry['check']}: {entry['message']}", file=sys.stderr)
        if one.error:
            print(f"no answer, {name}: {one.error}", file=sys.stderr)
    return sum(len(one.findings) + bool(one.error) for _, one in answers)


def _try(lab: Lab, recipe: Path | None, chosen: list[Misconfiguration], runs: Runs) -> list[Trial]:
    trials = []
    session = Trials(lab, recipe)
    for number, one in enumerate(chosen, 1):
        print(f". {number} of {len(chosen)}: {one.title}", file=sys.stderr, flush=True)
        try:
            trial = session.run(one)
        except HomelabError as error:
            raise SystemExit(f'error: "{one.name}" could not be injected and undone: {error}') from error
        trials.append(trial)
        runs.append(
            {
                "what": one.name, "title": one.title, "node": trial.node, "injected": trial.injected, "why_not": trial.why_not,
                "found": trial.found, "right_node": trial.right_node, "hint": trial.hint, "seconds": trial.seconds,
                "deep": "deep" in one.needs, "findings": list(trial.findings), "error": trial.error,
            }
        )  # fmt: skip
    return trials


def _table(trials: list[Trial]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("fault", "found", "right node", "hint"):
        table.add_column(heading, min_width=len(heading))
    table.add_column("seconds", justify="right", min_width=7)
    table.add_column("what was said", no_wrap=True, overflow="ellipsis", max_width=_SAID)
    for trial in trials:
        if not trial.injected:
            table.add_row(trial.misconfiguration.title, "not injected", "", "", "", trial.why_not, style="yellow")
            continue
        good = trial.found and trial.right_node and trial.hint
        words = ("yes" if value else "NO" for value in (trial.found, trial.right_node, trial.hint))
        table.add_row(trial.misconfiguration.title, *words, f"{trial.seconds:.1f}", trial.said, style="" if good else "red")
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; what was wrong with the lab is undone, and the lab is down", file=sys.stderr)
        sys.exit(130)

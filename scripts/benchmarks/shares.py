"""How much of three unequal nodes' speed a run gets, and what others get: tokens per second over the sum of the three solo runs'.

Three practice nodes of 0.6, 0.3 and 0.2 core train a small Llama with LoRA, 84 rows per step, on rows of equal and of very different
length. What is counted are tokens without padding, by the benchmark itself, from the row ids that every rank writes down and the
times of rank 0, between the ends of two steps after the first ones. Every step must hold 84 different rows.

auto_over_sum_*                       homelab, shares = "auto"
auto_ceiling_*                        the most that this machine's noise leaves in that run: its processors are not equally fast in every step
equal_over_sum_*                      homelab, shares = "equal"
rows_over_sum_varying_length          homelab's worker, rows dealt by their number in proportion to the solo speeds (rows_by_count.py)
hf_rebalance_over_sum_varying_length  the plain Hugging Face Trainer with its batch_rebalance (hf_rebalance.py)
after_throttle_over_sum               "auto", 14 to 20 steps after the fastest node was slowed down to a third, over the new sum
eta_error_percent                     what `homelab status` says at a fifth of the steps, against when it was done
plan_error_percent                    what `homelab plan` says before the run, from speeds measured in earlier ones, against that

The solo runs go side by side, each alone on its node: that is three times as quick, and the machine is as busy as in the runs that
are divided by them. Nodes start with one core, because importing torch at 0.2 core takes half a minute; each gets its limit when it
says that it trains, and the first steps are left out of every window. "equal" is measured as a first launch is, before any speeds
are known: where they are, homelab gives the longest rows to the fastest node even then, and that is no baseline.

After every part the benchmark judges itself: where a node used more CPU time than its limit allows, or less in a solo run, or where
others computed on this machine meanwhile, the round is discarded and played again, up to three times. Then it gives up, with exit
code 1. A part that ends early shows the run's events, and its folder is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.uneven import material
from benchmarks.uneven.aftermath import Interrupted
from benchmarks.uneven.ledger import Disturbed, Ledger
from benchmarks.uneven.machines import CORES, Machines, Run, machines

from homelab.controller.base.errors import HomelabError
from homelab.controller.planning.strategy.shares import split
from homelab.shared.law import order

_ENDLESS = 100_000  # steps of a run that is stopped
_SETTLE, _STEPS = 2, 6  # steps before the window, and in it
_SETTLE_AUTO, _STEPS_AUTO = 6, 10
_RUN_STEPS = 25  # of the run that goes to its end, with a forecast at a fifth
_SOLO_STEPS = 3  # of the slowest node; the others do more in the same time
_SOLO_STEPS_FIRST, _SOLO_STEPS_SLOWED = 6, 3  # of the node that is throttled, before and after
_STEPS_AFTER = 14  # between the throttle and the window, which ends 20 steps after it
_THROTTLED, _THIRD = "node1", 3
_TRIES = 4  # of a round
_EQUAL, _VARYING = material.DATA
_NOTE = f"""
Nodes start with one core and get {" / ".join(f"{cores:g}" for cores in CORES.values())} core when they train. Steps left out before a window: {_SETTLE_AUTO} with auto,
1 alone, {_SETTLE} otherwise, {_STEPS_AFTER} after the throttle. Tokens without padding; three nodes alone, side by side, are the sum."""


def main() -> int:
    """Returns 0; 1 when a round was disturbed whenever it was tried, 130 after Ctrl-C, and the exit code of an error of homelab,
    with nothing left running.
    """
    options = _arguments()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", file=sys.stderr, flush=True)

    say("making the model and the data")
    disturbed = None
    try:
        with machines(say, _fill) as nodes:
            bench = Bench(nodes, say)
            try:
                bench.all_rounds(options.repeats)
            except Disturbed as why:
                disturbed = why
    except Interrupted as how:
        return int(how.args[0])
    except HomelabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    report.finish("shares", bench.ledger.figures(), bench.ledger.raw, bench.ledger.table(), options.json)
    print(_NOTE)
    if disturbed:
        print(_given_up(bench.ledger.round, options.repeats, disturbed), file=sys.stderr)
    return 1 if disturbed else 0


def _given_up(number: int, of: int, why: Disturbed) -> str:
    rounds = f"round {number} of {of}" if number else "the first run"
    return (
        f"error: {rounds} was disturbed all {_TRIES} times, the last time so: {why}\nwhere: this machine\n"
        "fix:   see what else computes here (top), end it, and run this again; the figures above are those of the rounds before"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and raw measurements here")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of all the runs in turn (at least 3 for a figure)")
    parser.add_argument("--quick", action="store_const", const=1, dest="repeats", help="one round, about 9 minutes")
    return parser.parse_args()


def _fill(desk: Path) -> None:
    material.make_model(desk / "model")
    material.write_data(desk)
    for script in (Path(__file__).parent / "uneven").glob("*.py"):
        shutil.copyfile(script, desk / script.name)


class Bench:
    """All runs in turn."""

    def __init__(self, nodes: Machines, say: Callable[[str], None]) -> None:
        self.nodes = nodes
        self.say = say
        self.model = nodes.desk / "model"
        self.tokens = {kind: material.count_tokens(self.model, nodes.desk / file) for kind, file in material.DATA.items()}
        self.ledger = Ledger(say)

    def calibrate(self) -> None:
        """A first run to its end: no speeds are known, and it leaves some."""
        run = self._start("calibrate", _VARYING, "auto", _SETTLE_AUTO + 4)
        self.nodes.wait_for_end(run)
        window = run.window(_SETTLE_AUTO, _SETTLE_AUTO + 4)
        self.ledger.keep("calibrate", _VARYING, run, window, self.nodes.meter.account())

    def all_rounds(self, of: int) -> None:
        """The first run, and then so many rounds. Raises Disturbed when one was disturbed whenever it was tried."""
        self._undisturbed(0, self.calibrate)
        for number in range(1, of + 1):
            self.say(f"round {number} of {of}")
            self._undisturbed(number, self.repeat)

    def _undisturbed(self, number: int, play: Callable[[], None]) -> None:
        for tries_left in reversed(range(_TRIES)):
            self.ledger.begin(number)
            try:
                play()
            except Disturbed as why:
                self.say(f"this round is discarded: {why}")
                self.nodes.stop_all()
                if not tries_left:
                    self.ledger.begin(number)
                    raise
            else:
                self.ledger.end()
                return

    def repeat(self) -> None:
        """Every kind of run once."""
        for kind in (_EQUAL, _VARYING):
            solo, slowed = self.solo(kind)
            total = sum(solo.values())
            with self.nodes.speeds_set_aside():
                equal = self.window_of("equal", kind, _SETTLE, _STEPS)
            self.ledger.note(f"equal_over_sum_{kind}", equal / total)
            if kind == _EQUAL:
                auto = self.window_of("auto", kind, _SETTLE_AUTO, _STEPS_AUTO)
                self.ledger.note(f"auto_over_sum_{kind}", auto / total)
        run, auto = self.to_the_end()
        self.ledger.note(f"auto_over_sum_{_VARYING}", auto / total)
        self.ledger.note(f"rows_over_sum_{_VARYING}", self.rows(run, list(solo.values())) / total)
        self.ledger.note(f"hf_rebalance_over_sum_{_VARYING}", self.hf_rebalance() / total)
        self.ledger.note("after_throttle_over_sum", self.throttle() / (total - solo[_THROTTLED] + slowed))

    def solo(self, kind: str) -> tuple[dict[str, float], float]:
        """Tokens per second of each node alone; and, for varying lengths only, of the node that is throttled later."""
        runs = dict(zip(CORES, self._start_alone(kind), strict=True))
        slowest = min(CORES, key=lambda node: CORES[node])
        first, others = runs[_THROTTLED], [run for node, run in runs.items() if node != _THROTTLED]
        windows = {}
        if kind == _VARYING:
            self.nodes.wait_for_step(first, 1 + _SOLO_STEPS_FIRST)
            windows[_THROTTLED] = first.window(1, 1 + _SOLO_STEPS_FIRST)
            self._slow_down()
            settled = first.step() + 1
            self.nodes.wait_for_step(first, settled + _SOLO_STEPS_SLOWED)
        self.nodes.wait_for_step(runs[slowest], 1 + _SOLO_STEPS)
        for run in others:
            self.nodes.wait_for_step(run, 1 + _SOLO_STEPS)
        windows |= {node: run.window(1, run.step()) for node, run in runs.items() if node not in windows}
        slowed = first.window(settled, first.step()) if kind == _VARYING else None
        account = self.nodes.meter.account()
        for node in CORES:
            self.ledger.keep(f"solo {node}", kind, runs[node], windows[node], account, computing=True)
        if slowed:
            self.ledger.keep(f"solo {_THROTTLED} at a third", kind, first, slowed, account, computing=True)
        self.nodes.stop(*runs.values())
        return {node: windows[node].tokens_per_s for node in CORES}, slowed.tokens_per_s if slowed else 0.0

    def window_of(self, shares: str, kind: str, settle: int, steps: int) -> float:
        """Tokens per second of a run that is stopped after its window."""
        return self._measure(self._start(shares, kind, shares, _ENDLESS), shares, kind, settle, steps)

    def to_the_end(self) -> tuple[Run, float]:
        """Varying lengths with "auto" to its end, with both forecasts; the run, and its tokens per second."""
        plan = json.loads(self.nodes.homelab("plan", self._write("auto", _VARYING, "auto", _RUN_STEPS), "--json"))
        predicted_s = predicted(plan)
        run = self._start("auto", _VARYING, "auto", _RUN_STEPS)
        self.nodes.wait_for_step(run, _RUN_STEPS // 5)
        status = json.loads(self.nodes.homelab("status", run.name, "--json"))
        first_step = run.step() + 1  # the nodes' answers cost them CPU time in this step
        self.nodes.wait_for_end(run)
        account = self.nodes.meter.account()
        window = run.window(max(_SETTLE_AUTO, first_step), _RUN_STEPS)
        times = run.times()
        done = max(run.beat(rank)["time"] for rank in range(len(CORES)))
        # The first step began at full speed.
        trained_s = (times[_RUN_STEPS] - times[1]) * _RUN_STEPS / (_RUN_STEPS - 1)
        truth_s = trained_s + done - times[_RUN_STEPS]
        forecast = {
            "eta_s": status["eta_s"], "eta_truth_s": done - status["now"], "last_step_truth_s": times[_RUN_STEPS] - status["now"],
            "predicted_s": predicted_s, "truth_s": truth_s, "trained_s": trained_s,
        }  # fmt: skip
        if status["eta_s"] is not None:
            self.ledger.note("eta_error_percent", 100 * abs(status["eta_s"] / forecast["eta_truth_s"] - 1))
        if predicted_s is not None:
            self.ledger.note("plan_error_percent", 100 * abs(predicted_s / truth_s - 1))
        self.ledger.keep("auto", _VARYING, run, window, account, **forecast)
        return run, window.tokens_per_s

    def rows(self, earlier: Run, solo: list[float]) -> float:
        """Rows by count, in proportion to the solo speeds, over the data and recipe of an earlier run; tokens per second."""
        shares = split(material.GLOBAL_BATCH, solo)
        run = self._start_text("rows.toml", material.script_recipe(Path("rows_by_count.py"), earlier.name, *shares))
        speed = self._measure(run, "rows", _VARYING, _SETTLE, _STEPS, shares=shares)
        step = _SETTLE + _STEPS
        _, rows = order.step_rows(step - 1, seed=material.SEED, count=material.ROWS, global_batch=material.GLOBAL_BATCH)
        dealt = [list(rows[end - share : end]) for end, share in zip(accumulate(shares), shares, strict=True)]
        if [sorted(run.rows_of(rank)[step]) for rank in range(len(CORES))] != [sorted(ids) for ids in dealt]:
            raise SystemExit(f"error: {run.name} did not deal its rows by their number: rows_by_count.py does not fit this worker")
        return speed

    def hf_rebalance(self) -> float:
        """Hugging Face's own Trainer and sampler with the same model, method, data and global batch; tokens per second."""
        settings = {
            **material.LORA, "seed": material.SEED, "seq_len": material.SEQ_LEN, "pass_rows": material.PASS_ROWS, "learning_rate": material.LEARNING_RATE,
            "accumulate": material.GLOBAL_BATCH // (material.PASS_ROWS * len(CORES)),
        }  # fmt: skip
        data = self.nodes.desk / material.DATA[_VARYING]
        text = material.script_recipe(Path("hf_rebalance.py"), self.model, data, json.dumps(settings))
        return self._measure(self._start_text("hf_rebalance.toml", text), "hf_rebalance", _VARYING, _SETTLE, _STEPS)

    def throttle(self) -> float:
        """Varying lengths with "auto"; one node is slowed down; tokens per second 14 to 20 steps later."""
        run = self._start("throttle", _VARYING, "auto", _ENDLESS)
        self.nodes.wait_for_step(run, _SETTLE_AUTO // 2)
        self._slow_down()
        settled = run.step() + 1 + _STEPS_AFTER
        return self._measure(run, "after_throttle", _VARYING, settled, _STEPS)

    def _start(self, name: str, kind: str, shares: str, steps: int) -> Run:
        return self._start_text(self._write(name, kind, shares, steps), kind=kind)

    def _write(self, name: str, kind: str, shares: str, steps: int) -> str:
        file = f"{name}.toml"
        (self.nodes.desk / file).write_text(material.recipe(self.model, kind, shares, steps), encoding="utf-8")
        return file

    def _start_text(self, file: str, text: str | None = None, kind: str = _VARYING) -> Run:
        if text is not None:
            (self.nodes.desk / file).write_text(text, encoding="utf-8")
        return self.nodes.start([file], self.tokens[kind], material.GLOBAL_BATCH)[0]

    def _start_alone(self, kind: str) -> tuple[Run, ...]:
        files = [self._write(f"solo-{node}", kind, "auto", _ENDLESS) for node in CORES]
        return self.nodes.start(files, self.tokens[kind], material.GLOBAL_BATCH, alone=list(CORES))

    def _measure(self, run: Run, label: str, kind: str, settle: int, steps: int, **more: Any) -> float:
        self.nodes.wait_for_step(run, settle + steps)
        window = run.window(settle, settle + steps)
        self.ledger.keep(label, kind, run, window, self.nodes.meter.account(), **more)
        self.nodes.stop(run)
        return window.tokens_per_s

    def _slow_down(self) -> None:
        self.nodes.limit({_THROTTLED: CORES[_THROTTLED] / _THIRD})


def predicted(plan: dict[str, Any]) -> float | None:
    """Seconds of the whole run that `homelab plan --json` expects; None where it says nothing."""
    hours = (plan.get("time") or {}).get("hours")
    return None if hours is None else float(hours) * 3600


if __name__ == "__main__":
    sys.exit(main())

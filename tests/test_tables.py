"""Every table of the product at 80 columns: no head and no word of a cell is cut or broken."""

from __future__ import annotations

import ast
import functools
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from homelab.cli import explain, lab
from homelab.cli.clean_console import CleanConsole
from homelab.controller.base.errors import UnreachableError
from homelab.controller.checks import presentation, registry
from homelab.controller.checks.evidence import Finding
from homelab.controller.config.cluster import EnergyPrice
from homelab.controller.dashboard import run_list, view
from homelab.controller.dashboard.run_list import RunRow
from homelab.controller.features.bench import side_by_side
from homelab.controller.features.bench import table as bench_table
from homelab.controller.features.bench.result import Summary
from homelab.controller.features.profile import over_ranks, profile_tables
from homelab.controller.features.profile.over_ranks import ExchangeOverRanks, MemoryRow
from homelab.controller.features.profile.rank_profile import RankProfile
from homelab.controller.features.verify import verify_table
from homelab.controller.features.verify.step_record import Window
from homelab.controller.features.verify.verification import Verification
from homelab.controller.features.verify.window_verdict import WindowResult
from homelab.controller.planning.render import plan_table, scaling_table, time_table
from homelab.lab.lab import Lab
from tests import limits
from tests.controller.checks import healthy
from tests.controller.dashboard import sample, test_large, test_view
from tests.controller.features.bench import test_side_by_side
from tests.controller.features.profile import test_fetch_profiles
from tests.controller.planning.alternatives import test_scaling, test_what_if
from tests.controller.planning.speed.test_speeds import all_measured
from tests.controller.planning.test_plan import make

pytestmark = pytest.mark.timeout(60)
WIDTH = 80
NAMES = healthy.NAMES
RUNS = ("2026-11-26-0635-demo", "2026-11-26-0712-demo-alone")


def printed(renderable: Any, width: int = WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False, emoji=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words_of(table: Table) -> list[str]:
    """Of the title, the heads and the cells that are text."""
    texts = [table.title, *(column.header for column in table.columns), *(cell for column in table.columns for cell in column.cells)]
    return [word for text in texts if isinstance(text, str | Text) for word in str(text).split()]


def faults(table: Table, width: int = WIDTH) -> list[str]:
    """What is cut or broken."""
    shown = printed(table, width)
    missing = Counter(words_of(table)) - Counter(shown.split())
    broken = [str(column.header) for column in table.columns if any(sign in str(column.header) for sign in ("-\n", "\n/", "/\n"))]
    wide = [line for line in shown.splitlines() if len(line) > width]
    return [*missing, *broken, *wide, *(["…"] if shown.count("…") > "".join(words_of(table)).count("…") else [])]


def tables_in(renderable: Any) -> Iterator[Table]:
    if isinstance(renderable, Table):
        yield renderable
    elif isinstance(renderable, Padding):
        yield from tables_in(renderable.renderable)
    elif isinstance(renderable, Group | list | tuple):
        for part in renderable.renderables if isinstance(renderable, Group) else renderable:
            yield from tables_in(part)


def plans() -> Iterator[Any]:
    cards = healthy.gpu(healthy.recipe())
    yield plan_table.table(make(cards), why=True)
    yield plan_table.table(make(cards))
    yield plan_table.table(make(healthy.cpu(healthy.recipe())), why=True)
    yield plan_table.table(make(all_measured(healthy.cpu(healthy.recipe()), (4e-3, 1e-3, 2e-3))), why=True)
    held = healthy.with_facts(cards, "laptop")
    yield plan_table.table(make(healthy.card(held, "laptop", memory_used_bytes=5 << 30, memory_free_bytes=3 << 30)), why=True)


def checks() -> Iterator[Any]:
    well = healthy.gpu(healthy.recipe())
    broken = healthy.with_facts(healthy.cut(healthy.cpu(), ("tower", "laptop")), "oldtower", power={"source": "battery"})
    silent = healthy.unreachable(healthy.cpu(), "laptop", UnreachableError("no answer within 10 s", hint="wake it"))
    differences = [("nvidia driver", {"tower": "580.126.09", "laptop": "570.195.03", "oldtower": "580.126.09"})]
    for evidence in (well, broken, silent):
        yield presentation.table(registry.judge_all(evidence, frozenset()), NAMES, differences)
    many = [f"node{number}" for number in range(1, 25)]
    yield presentation.table([Finding("network.reach", name, "fail" if name.endswith("7") else "ok", "m", "h") for name in many], many)
    ten = many[:10]
    yield presentation.table([Finding("network.reach", name, "warn" if name.endswith("7") else "ok", "m", "h") for name in ten], ten)


def profiles() -> Iterator[Table]:
    ranks = [RankProfile.model_validate(test_fetch_profiles.summary(rank, node=node)) for rank, node in enumerate(NAMES)]
    yield profile_tables.operators(over_ranks.dearest(ranks))
    yield profile_tables.phases(ranks)
    yield profile_tables.exchanges([
        ExchangeOverRanks(name=f"bucket {number}", kind="all-reduce", calls=1.0, sent_bytes=25e6 + number, seconds=0.512, overlap=0.83)
        for number in range(20)
    ])  # fmt: skip
    yield profile_tables.memory([MemoryRow(rank=0, node="oldtower", peak_bytes=7 << 30, peak_phase="backward", predicted_bytes=8 << 30)])


def benches() -> Iterator[Table]:
    yield bench_table.table([
        Summary(variation=variation, strategy=strategy, nodes=NAMES, runs=3, tokens_per_s=1234.5, tokens_per_s_low=1199.0, tokens_per_s_high=1250.0, step_s=12.4,
                wire=0.12, efficiency=0.93, plan_error=-0.04)
        for variation, strategy in (("", "ddp"), ("qlora-7b", "pipeline"))
    ])  # fmt: skip
    sides = [side_by_side.side_of(test_side_by_side.sources(name, 3, 1.25), warmup=1) for name in RUNS]
    yield from side_by_side.tables(side_by_side.compare(sides), EnergyPrice(price_per_kwh=0.3, currency="EUR"), WIDTH)


def windows() -> Iterator[Table]:
    done: dict[str, Any] = {
        "run": "verify-100000-100020",
        "strategy": "pipeline",
        "loss_apart": 2e-7,
        "loss_bound": 1e-5,
        "weights_apart": 3e-6,
        "weights_bound": 1e-4,
    }
    results = [
        WindowResult(window=Window(begin=99980, end=100000), verdict="agrees", nodes=NAMES, **done),
        WindowResult(window=Window(begin=100000, end=100020), verdict="not computed", because="no node that answers has the checkpoint of step 100000"),
    ]  # fmt: skip
    yield verify_table.table(
        Verification(
            run=RUNS[0],
            answer="",
            verdict="agrees",
            precision="fp32",
            last_step=100020,
            chain="0" * 32,
            card_end="",
            node="tower",
            windows=tuple(results),
        )
    )


def of_lab() -> list[Any]:
    """Those that its commands print."""
    shown: list[Any] = []
    node = {
        "host": "10.213.112.11", "port": 22, "power": "on", "frozen": False, "ssh": True, "cable": "plugged", "cpu_cores": 0.5, "processes": 12, "runs": RUNS[:1],
    }  # fmt: skip
    status = {"lab": "lab-fd0633", "backend": "namespaces", "network": "10.213.112.0/24", "rate": "1gbit", "note": "", "folder": "/tmp/lab", "nodes": [
        {**node, "name": f"node{number}"} for number in range(1, 4)
    ]}  # fmt: skip
    opened = mock.patch.object(Lab, "open", return_value=mock.Mock(status=lambda: status))
    with opened, mock.patch.object(CleanConsole, "print", lambda self, *objects, **_: shown.extend(objects)):
        for arguments in (["status", "lab"], ["faults"]):
            assert CliRunner().invoke(lab.app, arguments).exit_code == 0
    return shown


CASES: dict[str, Callable[[], Iterable[Any]]] = {
    "plan": plans,
    "what if": lambda: [time_table.before_and_after(*test_what_if.changed(test_what_if.GPUS, "-laptop"), ["now", "-laptop"])],
    "scaling": lambda: [scaling_table.table(test_scaling.curve(test_scaling.MEASURED, "1..14", healthy.recipe()))],
    "preflight": checks,
    "profile": profiles,
    "bench and compare": benches,
    "verify": windows,
    "explain law": lambda: [explain._influences()],
    "practice nodes": of_lab,
}


@functools.cache
def drawn() -> tuple[dict[str, list[Table]], frozenset[str]]:
    """Case -> its tables, made once; and the functions of the product that have made one."""
    made: set[str] = set()
    whole = Table.__init__

    def noted(self: Table, *arguments: Any, **options: Any) -> None:
        code = sys._getframe(1).f_code
        if Path(code.co_filename).is_relative_to(limits.ROOT):
            made.add(f"{Path(code.co_filename).relative_to(limits.ROOT)}: {code.co_name}")
        whole(self, *arguments, **options)

    with mock.patch.object(Table, "__init__", noted):
        found = {name: [table for renderable in case() for table in tables_in(renderable)] for name, case in CASES.items()}
    return found, frozenset(made)


@pytest.mark.parametrize("name", CASES)
def test_no_head_and_no_word_is_cut_or_broken(name: str) -> None:
    found = drawn()[0][name]
    assert found
    for table in found:
        assert faults(table) == [], printed(table)


def test_a_table_that_breaks_words_is_seen() -> None:
    table = Table("a heading", "b", box=None)
    table.add_row("wonderfully" * 4, "x " * 9)
    assert faults(table, 30) and faults(table, 100) == []
    assert faults(Table("effi-\nciency", box=None)) == ["effi-\nciency"]
    cut = Table("a", box=None)
    cut.columns[0].no_wrap = True
    cut.add_row("some words that are long")
    assert "…" in faults(cut, 12)


@pytest.mark.parametrize("height", [None, 60])
def test_the_tables_of_the_dashboard_leave_columns_out_instead(height: int | None) -> None:
    why = "no answer within 10 s: it is off, asleep, or its address has changed since the launch; the last answer is 12 min old"
    for shot in (
        sample.snapshot(),
        test_large.shot(),
        test_view.failed(),
        test_view.many(4),
        sample.snapshot(replies={}, unreachable={"old": why}),
    ):
        lines = [line.plain for line in view.lines(shot, WIDTH, height)]
        assert not [line for line in lines if "…" in line], lines
    assert why in " ".join(" ".join(lines).split())


def test_the_list_of_runs() -> None:
    rows = [RunRow(name, "running", 12, 1000.0, ("tower", "laptop", "oldtower")) for name in RUNS]
    lines = [line.plain for line in run_list.lines(rows, 5000.0, WIDTH)]
    assert not [line for line in lines if "…" in line or len(line) > WIDTH] and all(any(name in line for line in lines) for name in RUNS)


def test_every_table_of_the_product_is_among_them() -> None:
    """A function that makes a Table is called by a case of this file."""
    assert makers() - drawn()[1] == set(), "a case of this file makes and prints it"


def makers() -> set[str]:
    """path: function, of all that make a table of rich."""
    found = set()
    for path, tree in limits.trees().items():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "rich.table"]
        if not any(name.name == "Table" for node in imports for name in node.names):
            continue
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            if any(
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Table" for node in ast.walk(function)
            ):
                found.add(f"{path.relative_to(limits.ROOT)}: {function.name}")
    return found

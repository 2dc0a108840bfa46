"""Wrong files, names and options: refused before any node is asked, with exit code 2, three parts and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from scripts.practice.desk import COMMAND, Desk
from tests.cli.conftest import LAW, complaint

pytestmark = pytest.mark.timeout(200)
ODD = 'it\'s "$(touch pwned)" `touch pwned` ä\n; touch pwned'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["preflight", "--cluster", "nowhere.toml"], "there is no cluster.toml here"),
        (["preflight", "--cluster", "."], "cannot be read: Is a directory"),
        (["plan", "nowhere.toml"], "there is no recipe here"),
        (["launch", "."], "cannot be read: Is a directory"),
        (["preflight", "--nodes", "b"], 'no node is called "b"'),
        (["preflight", "--nodes", ","], "no node is named"),
        (["preflight", "--nodes", "$(touch pwned)\n'x\" ä"], "no node is called"),
        (["preflight", "--only", "pyhton"], 'there is no check "pyhton". Did you mean "python"?'),
        (["launch", "script.toml", "--skip", "everything"], 'there is no check "everything"'),
        (["preflight", "--only", "ssh", "--skip", "ssh"], "every check is skipped"),
        (["logs", "--lines", "0"], "--lines"),
        (["logs", "--rank", "first"], "--rank"),
        (["logs", "--attempt", "0"], "--attempt"),
        (["chat", "--base", "--compare"], "--compare"),
        (["chat", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["launch", "script.toml", "--profile", "3"], "only the built-in worker makes profiles"),
        (["launch", "law.toml", "--profile", "soon"], "names no steps"),
        (["launch", "law.toml", "--profile", "2-3"], "the run ends after step 2, before step 3"),
        (["launch", "law.toml", "--profile-ranks", "0"], "the steps to profile are missing"),
        (["lunch", "script.toml"], "lunch"),
        (["plan"], "recipe"),
        (["plan", "law.toml", "--offlin"], "--offlin"),
        (["plan", "law.toml", "twice.toml"], "twice.toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input(quiet_desk: Desk, arguments: list[str], words: str) -> None:
    found = complaint(quiet_desk, *arguments, code=2)
    assert words in found["message"] + found["where"], found


@pytest.mark.parametrize("arguments", [[], ["lab"]], ids=lambda arguments: " ".join(arguments) or "homelab")
def test_a_group_of_commands_without_arguments_shows_its_help(quiet_desk: Desk, arguments: list[str]) -> None:
    found = quiet_desk.homelab(*arguments, code=0)
    assert "Usage:" in found.stdout + found.stderr and "error:" not in found.stderr


@pytest.mark.parametrize(
    "arguments", [["--what-if", "-laptop"], ["--what-if=-laptop"], ["--what-if", "+RTX3090", "--what-if=-laptop"]], ids=" ".join
)
def test_what_if_takes_a_value_that_looks_like_an_option(quiet_desk: Desk, arguments: list[str]) -> None:
    cards = '\ngpus = [{ model = "RTX 3070 Ti", vram_gb = 8 }]\n'
    quiet_desk.write(
        "two.toml", "".join(f'[[nodes]]\nname = "{name}"\nhost = "127.0.0.{n}"{cards}' for n, name in enumerate(("tower", "laptop"), 1))
    )
    quiet_desk.write("known.toml", LAW.replace("/nowhere/model", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"))
    command = ["plan", "known.toml", "--offline", "--cluster", "two.toml", *arguments]
    shown = quiet_desk.homelab(*command, code=0).stdout
    assert "tokens/s" in shown and "Nothing was started" in shown
    found = quiet_desk.json(*command, code=0)
    assert set(found) == {"what_if", "before", "after"} and "-laptop" in found["what_if"]
    assert found["before"]["nodes"] == ["tower", "laptop"] and "laptop" not in found["after"]["nodes"]
    assert found["before"]["time"]["tokens_per_s"] > 0 and found["after"]["fits"] is True


def test_the_curve_over_numbers_of_machines(quiet_desk: Desk) -> None:
    cards = '\ngpus = [{ model = "RTX 3070 Ti", vram_gb = 8 }]\n'
    quiet_desk.write(
        "two.toml", "".join(f'[[nodes]]\nname = "{name}"\nhost = "127.0.0.{n}"{cards}' for n, name in enumerate(("tower", "laptop"), 1))
    )
    quiet_desk.write("known.toml", LAW.replace("/nowhere/model", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"))
    command = ["plan", "known.toml", "--offline", "--cluster", "two.toml", "--what-if-nodes", "1..3", "--what-if", "wire=2.5gbit"]
    shown = quiet_desk.homelab(*command, code=0).stdout
    assert "copy of laptop" in shown and "guess" in shown and "2.5gbit is assumed" in shown and "Nothing was started" in shown
    found = quiet_desk.json(*command, "--like", "tower", code=0)
    assert (found["like"], found["what_if"], [point["machines"] for point in found["points"]]) == ("tower", ["wire=2.5gbit"], [1, 2, 3])
    assert (
        found["points"][2]["nodes"] == ["tower", "laptop", "tower-copy-1"]
        and found["points"][2]["tokens_per_s"] > found["points"][0]["tokens_per_s"]
    )
    assert (
        "more than 64 machines" in complaint(quiet_desk, "plan", "known.toml", "--offline", "--what-if-nodes", "1..100", code=2)["message"]
    )
    assert "--what-if-nodes is missing" in complaint(quiet_desk, "plan", "known.toml", "--offline", "--like", "tower", code=2)["message"]


def test_what_if_where_it_fits_nowhere_now(quiet_desk: Desk) -> None:
    quiet_desk.write("small.toml", '[[nodes]]\nname = "old"\nhost = "127.0.0.1"\ngpus = [{ model = "GTX 1650", vram_gb = 1 }]\n')
    quiet_desk.write("known.toml", LAW.replace("/nowhere/model", "meta-llama/Llama-2-7b-hf").replace('"lora"', '"qlora"'))
    command = ["plan", "known.toml", "--offline", "--cluster", "small.toml", "--what-if", "+RTX3090"]
    shown = " ".join(quiet_desk.homelab(*command, code=0).stdout.split())
    assert "nowhere" in shown and "the GTX 1650 of old stays out" in shown and "no rank has room" in shown
    found = quiet_desk.json(*command, code=0)
    assert (found["before"]["fits"], found["before"]["time"]) == (False, None) and "no rank has room" in found["before"]["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("+RTX3091", 'Did you mean "RTX 3090"?'),
        ("-b", 'no node is named "b"'),
        ("+RTX3090", "trains on CPUs"),
        ("-a", "no node is left"),
        ("a", "neither a machine to add"),
    ],
)
def test_what_cannot_be_asked_for(quiet_desk: Desk, change: str, words: str) -> None:
    assert words in complaint(quiet_desk, "plan", "law.toml", "--offline", "--what-if", change, code=2)["message"]


def test_a_node_that_nobody_knows_is_not_trusted(quiet_desk: Desk) -> None:
    assert 'no node is called "nobody"' in complaint(quiet_desk, "trust", "nobody", code=2, as_json=False)["message"]


def test_every_fault_of_a_recipe_in_one_error(quiet_desk: Desk) -> None:
    quiet_desk.write("bad.toml", LAW.replace("steps = 2", "stepps = 2").replace('"lora"', '"lorra"') + "[parallel]\nshares = { a = 0 }\n")
    found = complaint(quiet_desk, "launch", "bad.toml", code=2)
    assert found["message"].startswith("3 faults:")
    for words in (
        "line 6, method.kind",
        'Did you mean "lora"?',
        "line 9, train.stepps",
        'Did you mean "steps"?',
        "line 12, parallel.shares",
        "not 0 for all",
    ):
        assert words in found["message"], found["message"]
    assert found["where"] == "bad.toml"


@pytest.mark.parametrize(
    ("shares", "batch", "words"), [("{ a = 5 }", 8, "8"), ("{ a = 8, zzz = 0 }", 8, "zzz"), ("{ zzz = 8 }", 8, "zzz"), ('"auto"', 8, "")]
)
def test_shares_that_do_not_fit_the_cluster(quiet_desk: Desk, shares: str, batch: int, words: str) -> None:
    quiet_desk.write("shares.toml", LAW.replace("global_batch = 8", f"global_batch = {batch}") + f"[parallel]\nshares = {shares}\n")
    if words:
        found = complaint(quiet_desk, "plan", "shares.toml", "--offline", code=2)
        assert words in found["message"] and "shares" in found["where"], found
    else:
        quiet_desk.homelab("plan", "shares.toml", "--offline")


def test_a_global_batch_smaller_than_the_ranks(quiet_desk: Desk) -> None:
    quiet_desk.write("cluster.toml", "".join(f'[[nodes]]\nname = "n{i}"\nhost = "127.0.0.{i}"\n' for i in (2, 3, 4)))
    quiet_desk.write("small.toml", LAW.replace("global_batch = 8", "global_batch = 2"))
    found = complaint(quiet_desk, "plan", "small.toml", "--offline", code=2)
    assert "global batch of 2" in found["message"] and "3 ranks" in found["message"]


def test_shares_that_leave_nobody_of_the_named_nodes(quiet_desk: Desk) -> None:
    quiet_desk.write("cluster.toml", "".join(f'[[nodes]]\nname = "n{i}"\nhost = "127.0.0.{i}"\n' for i in (2, 3)))
    quiet_desk.write("zero.toml", LAW + "[parallel]\nshares = { n2 = 8, n3 = 0 }\n")
    found = complaint(quiet_desk, "plan", "zero.toml", "--offline", "--nodes", "n3", code=2)
    assert "n3" in found["message"] and "shares" in found["where"], found


@pytest.mark.parametrize(
    "key", ['train = "nowhere.jsonl"', 'train = "."', 'train = "empty.jsonl"', 'train = "../../../../../../../etc/nowhere"']
)
def test_a_data_file_that_cannot_be_shipped(quiet_desk: Desk, key: str) -> None:
    quiet_desk.write("empty.jsonl", "")
    quiet_desk.write("data.toml", LAW.replace('train = "chats.jsonl"', key))
    found = complaint(quiet_desk, "launch", "data.toml", code=2)
    assert "key data.train" in found["where"] and "data.toml" in found["where"]
    assert not (quiet_desk.folder / "runs").exists()


def test_odd_names_of_files_break_nothing_and_run_nothing(quiet_desk: Desk) -> None:
    folder = quiet_desk.folder / ODD.replace("/", "")
    folder.mkdir()
    for name in (ODD, "--help", "-x.toml"):
        (folder / name).write_text(LAW)
        (folder / f"cluster {name}").write_text((quiet_desk.folder / "cluster.toml").read_text())
        quiet_desk.homelab("plan", str(folder / name), "--offline", "--cluster", str(folder / f"cluster {name}"))
        quiet_desk.json("plan", str(folder / name), "--offline", "--cluster", str(folder / f"cluster {name}"))
    complaint(quiet_desk, "launch", str(folder / ODD), "--cluster", str(folder / "none"), code=2)
    complaint(quiet_desk, "launch", str(folder / ODD), code=2)  # its data file is not there
    assert not list(quiet_desk.folder.rglob("pwned"))


def test_the_next_command_can_be_pasted(quiet_desk: Desk) -> None:
    recipe = quiet_desk.write("my $(touch pwned) recipe's.toml", LAW)
    shown = quiet_desk.homelab("plan", recipe.name, "--offline").stdout
    # the model is nowhere
    words = next(line for line in shown.splitlines() if line.startswith("Next: ")).removeprefix("Next: homelab preflight ")
    echoed = subprocess.run(["/bin/sh", "-c", f"printf %s {words}"], capture_output=True, text=True, cwd=quiet_desk.folder, check=True)
    assert echoed.stdout == recipe.name
    assert not list(quiet_desk.folder.rglob("pwned"))


def test_a_file_name_that_is_no_utf8(quiet_desk: Desk) -> None:
    name = os.fsencode(quiet_desk.folder) + b"/\xff\xfe.toml"
    Path(os.fsdecode(name)).write_text(LAW)
    for options in ([], ["--json"]):
        done = subprocess.run(
            [*COMMAND, "plan", name, "--offline", *options], cwd=quiet_desk.folder, env=quiet_desk._environment(), capture_output=True
        )
        assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [*COMMAND, "plan", b"\xff.toml", "--json"], cwd=quiet_desk.folder, env=quiet_desk._environment(), capture_output=True
    )
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["exit_code"] == 2


def test_a_terminal_that_knows_few_letters(quiet_desk: Desk) -> None:
    quiet_desk.write("küche 中.toml", LAW)
    environment = quiet_desk._environment() | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for arguments in (["plan", "küche 中.toml", "--offline"], ["plan", "中.toml"]):
        done = subprocess.run([*COMMAND, *arguments], cwd=quiet_desk.folder, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr and "internal" not in done.stderr, done.stderr


def test_the_first_answers(quiet_desk: Desk) -> None:
    assert "homelab" in quiet_desk.homelab("--version").stdout
    assert "preflight" in quiet_desk.homelab("--help").stdout
    assert "preflight" in quiet_desk.homelab(code=None).stdout + quiet_desk.homelab(code=None).stderr


def test_help_of_the_lab_names_every_fault(quiet_desk: Desk) -> None:
    from homelab.lab.faults import FAULTS

    shown = "".join(quiet_desk.homelab("lab", "fault", "--help").stdout.replace("│", "").split())
    assert all(name in shown for name in FAULTS)


def test_odd_folders_for_a_lab(quiet_desk: Desk) -> None:
    for name in ("a\nb", 'a"b', "a$(touch pwned)b"):
        found = complaint(quiet_desk, "lab", "up", name, code=2, as_json=False)
        assert "a lab's folder cannot have" in found["message"]
    for arguments in (["lab", "down", ODD], ["lab", "status", ODD], ["lab", "fault", ODD, "a", "freeze"]):
        assert "there is no lab here" in complaint(quiet_desk, *arguments, code=2, as_json=False)["message"]
    assert "cpu" in complaint(quiet_desk, "lab", "up", "x", "--cpu", "much", code=2, as_json=False)["where"]
    assert "--nodes" in complaint(quiet_desk, "lab", "up", "x", "--nodes", "0", code=2, as_json=False)["where"]
    assert not (quiet_desk.folder / "x").exists() and not list(quiet_desk.folder.rglob("pwned"))

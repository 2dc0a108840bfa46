"""A command line that trains, as the program that torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config.program_command import WRAPPER, Program, parsed


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python train.py --epochs 3", Program("train.py", ("--epochs", "3"))),
        ("./train.py x", Program("train.py", ("x",))),
        ("/usr/bin/python3.12 src/train.py", Program("src/train.py", ())),
        ("python -m package.train a", Program("package.train", ("a",), is_module=True)),
        ("accelerate launch train.py --lr 1", Program("train.py", ("--lr", "1"))),
        ("torchrun train.py", Program("train.py", ())),
        ("trl sft --model_name_or_path x", Program("trl.scripts.sft", ("--model_name_or_path", "x"), is_module=True)),
        ("axolotl train c.yml", Program("axolotl.cli.train", ("c.yml",), is_module=True)),
        ("llamafactory-cli train c.yaml", Program("llamafactory.launcher", ("c.yaml",), is_module=True)),
    ],
)
def test_a_command_is_a_program(line: str, program: Program) -> None:
    assert parsed(line.split()) == program


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "there is no command"), ("bash train.sh", "cannot start 'bash'"), ("python -c pass", "python is given -c"), ("python", "is given nothing"),
        ("torchrun --nnodes 2 train.py", "torchrun is given --nnodes"), ("accelerate launch --mixed_precision bf16 train.py", "accelerate is given --mixed_precision"),
        ("python ../train.py", "is not below this folder"), ("python /home/me/train.py", "is not below this folder"), ("trl env", "cannot start 'trl'"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_told(line: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        parsed(line.split())
    assert words in refused.value.message and refused.value.hint


@pytest.mark.parametrize(
    ("line", "label"),
    [("python train_llama.py", "train-llama"), ("trl sft", "trl-sft"), ("axolotl train c", "axolotl-train"), ("python a/b.py", "b")],
)
def test_a_run_is_named_after_its_program(line: str, label: str) -> None:
    assert parsed(line.split()).label == label


@pytest.mark.parametrize("line", ["python src/train.py 1 2", "python -m src.train 1 2"])
def test_the_program_runs_as_where_it_was_typed(tmp_path: Path, line: str) -> None:
    """In its folder, with its arguments, and with the modules beside it."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/helper.py").write_text("WORD = 'helped'")
    asks = "from src.helper import WORD" if "-m" in line else "from helper import WORD"
    (tmp_path / "src/train.py").write_text(f"import sys\n{asks}\nprint(WORD, sys.argv[1:], open('rows.txt').read(), __name__)")
    (tmp_path / "rows.txt").write_text("rows")
    program = parsed(line.split())
    (tmp_path / WRAPPER).write_text(program.wrapper)
    words = [*program.args, "--to=$HOMELAB_CHECKPOINT_DIR/x"]
    done = subprocess.run(
        [sys.executable, str(tmp_path / WRAPPER), *words], cwd="/", env={**os.environ, "HOMELAB_CHECKPOINT_DIR": "/saved"}, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout == "helped ['1', '2', '--to=/saved/x'] rows __main__\n", done.stderr


NEWEST = "$HOMELAB_LAST_CHECKPOINT"


@pytest.mark.parametrize(
    "typed",
    [["--resume", NEWEST, "--more"], [f"--resume={NEWEST}", "--more"], ["-r", NEWEST, "--more"], [f"--resume={NEWEST}/state.pt", "--more"]],
)
@pytest.mark.parametrize("last", ["/saved/checkpoint-350", "", None])
def test_a_program_is_told_what_it_has_saved_before(tmp_path: Path, typed: list[str], last: str | None) -> None:
    """At the first start there is nothing: an option without a value would be an error."""
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])")
    (tmp_path / WRAPPER).write_text(parsed(["python", "train.py"]).wrapper)
    environment = {**os.environ, "HOMELAB_CHECKPOINT_DIR": "/saved", **({} if last is None else {"HOMELAB_LAST_CHECKPOINT": last})}
    done = subprocess.run(
        [sys.executable, str(tmp_path / WRAPPER), *typed], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == f"{[word.replace(NEWEST, last) for word in typed] if last else ['--more']}\n", done.stderr

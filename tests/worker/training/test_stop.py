"""What ends a worker early, and what it says then; and what a good end leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.law import order
from homelab.shared.protocol import layout
from homelab.shared.protocol.manifest import folder_name
from homelab.worker.checkpoints import checkpoint_folder
from homelab.worker.errors import WorkerError
from homelab.worker.runtime.task import load_task
from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_loss_that_is_not_a_number_stops_the_run_naming_step_and_rank(forks: harness.Forks, tmp_path: Path, model: Path) -> None:
    """One token has no meaning (its embedding is NaN), and one row of the data uses it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, broken = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("~")] = float("nan")
    broken.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = harness.chat_rows(24)
    rows[17]["messages"][0]["content"] = "~"
    data = harness.write_jsonl(tmp_path / "d.jsonl", rows)
    run = harness.make_run(tmp_path / "run", tmp_path / "model", data, train__global_batch=4, checkpoint__every_steps=1)
    codes, output = forks.run(run, 1, [3, 1])

    step = next(s for s in range(6) if 17 in order.step_rows(s, seed=42, count=24, global_batch=4)[1]) + 1
    assert step > 1, "choose another row: the test wants a checkpoint before"
    assert codes == [1, 1] and "Traceback" not in output
    errors = [harness.error_of(run, 1, rank) for rank in (0, 1)]
    assert errors[0]["message"] == errors[1]["message"]
    assert f"step {step} on rank" in errors[0]["message"] and "(here)" in errors[0]["message"]
    guilty = int(errors[0]["message"].split("on rank ")[1].split()[0])
    assert "17" in errors[guilty]["where"] and "learning_rate" in errors[0]["hint"] and errors[0]["needs_launch"]
    assert checkpoint_folder.complete_steps(run / "checkpoints")[-1] == step - 1, "the last good checkpoint is kept"
    checkpoint_folder.verify(run / "checkpoints" / folder_name(step - 1), json.loads((run / "run.json").read_text())["recipe_hash"])


def test_a_bad_row_is_one_message_and_exit_code_two(forks: harness.Forks, tmp_path: Path, model: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n{"messages": 3}\n')
    run = harness.make_run(tmp_path / "run", model, data)
    codes, output = forks.run(run, 1, [12])
    assert codes == [2]
    assert output.startswith("error: the messages must be a list") and f"where: {data}, line 2" in output and "fix: " in output
    assert "Traceback" not in output and len(output.strip().splitlines()) == 3
    error = harness.error_of(run, 1)
    assert set(error) == {"message", "where", "hint"}


def test_a_model_folder_that_is_not_there_is_named(forks: harness.Forks, tmp_path: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "run", tmp_path / "nowhere", data)
    codes, output = forks.run(run, 1, [12])
    assert codes == [2] and "does not exist on this node" in output and "rsync" in output and "Traceback" not in output


def test_adapters_that_fit_nothing_name_what_would(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "run", model, data, method__kind="lora", method__targets=["query"])
    codes, output = forks.run(run, 1, [12])
    assert codes == [2] and "[method] targets" in output and "q_proj" in output and "Traceback" not in output


def test_a_plan_that_does_not_fit_the_command_is_refused(tmp_path: Path, model: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "run", model, data)
    harness.make_plan(run, 1, [6, 6])
    base = {"HOMELAB_RUN_DIR": str(run), "HOMELAB_ATTEMPT": "1", "HOMELAB_NODE": "here", "RANK": "0", "WORLD_SIZE": "2"}
    assert load_task(base).shares == (6, 6)
    with pytest.raises(WorkerError, match="started 3 processes, the plan says 2"):
        load_task(base | {"WORLD_SIZE": "3"})
    with pytest.raises(WorkerError, match="runs on node there, the plan puts it on here"):
        load_task(base | {"HOMELAB_NODE": "there"})
    with pytest.raises(WorkerError, match="HOMELAB_NODE"):
        load_task({name: value for name, value in base.items() if name != "HOMELAB_NODE"})
    harness.make_plan(run, 2, [6, 5])
    with pytest.raises(WorkerError, match="do not add up to global_batch 12"):
        load_task(base | {"HOMELAB_ATTEMPT": "2"})
    whole = json.loads((run / "run.json").read_text())
    del whole["recipe"]["train"]["seq_len"]
    (run / "run.json").write_text(json.dumps(whole))
    with pytest.raises(WorkerError, match=r"\[train\] of the recipe lacks seq_len") as caught:
        load_task(base)
    assert caught.value.where == str(run / "run.json") and "homelab launch" in caught.value.hint
    del whole["recipe"]["checkpoint"]
    (run / "run.json").write_text(json.dumps(whole | {"recipe": whole["recipe"] | {"train": {**harness.resolved_recipe()["train"]}}}))
    with pytest.raises(WorkerError, match=r"the recipe has no \[checkpoint\]"):
        load_task(base)
    (run / "run.json").write_text("{")
    with pytest.raises(WorkerError, match=r"run\.json is not JSON"):
        load_task(base)


def ask(run: Path, **question: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "homelab.worker.tools.chat"]
    text = json.dumps({"run_dir": str(run), "prompt": "say it", "max_new_tokens": 8, **question})
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=150, cwd=harness.REPOSITORY)
    return done.returncode, done.stdout or done.stderr


def test_asked_before_anything_is_trained_it_says_so_and_loads_nothing(tmp_path: Path, model: Path) -> None:
    there = shutil.copytree(model, tmp_path / "model")
    run = harness.make_run(tmp_path / "run", there, harness.write_jsonl(tmp_path / "d.jsonl", harness.chat_rows(8)))
    shutil.rmtree(there)  # whoever looks for it first complains of that
    code, said = ask(run)
    assert code == 2 and "no checkpoint yet" in said and str(run / "checkpoints") in said, said


@pytest.mark.thorough
def test_a_good_end_leaves_a_model_that_answers_what_it_learned(forks: harness.Forks, tmp_path: Path, model: Path) -> None:
    """Metrics, heartbeat, TensorBoard, final/ with a model card, retention; then the trained model speaks."""
    row = {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "abab"}]}
    data = harness.write_jsonl(tmp_path / "d.jsonl", [row] * 8)
    recipe: dict[str, Any] = {"train__global_batch": 8, "train__epochs": 40, "train__learning_rate": 5e-3, "tracking__tensorboard": True}
    run = harness.make_run(
        tmp_path / "run", model, data, **recipe, checkpoint__every_steps=10, checkpoint__keep=2, data__eval_fraction=0.125
    )
    forks.train(run, 1, [8], micro_batch=8)

    rank = run / "attempts/1/ranks/0"
    beat = json.loads((rank / "heartbeat.json").read_text())
    assert (beat["phase"], beat["step"], beat["total_steps"]) == ("done", 40, 40)
    train = harness.lines(run, 1, 0, "metrics.jsonl", "train")
    assert [line["step"] for line in train] == list(range(1, 41))
    wanted = {"time", "attempt", "rank", "node", "step", "epoch", "loss", "perplexity", "learning_rate", "grad_norm", "tokens"}
    wanted |= {
        "samples",
        "tokens_per_s",
        "compute_s",
        "communication_s",
        "input_s",
        "step_s",
        "memory_bytes",
        "share",
        "kind",
        "sent_bytes",
    }
    assert set(train[0]) == wanted
    assert train[0]["epoch"] == 1.0 and train[0]["samples"] == 7 and train[-1]["loss"] < 0.1 < train[0]["loss"]
    assert all(line["compute_s"] > 0 and line["step_s"] >= line["compute_s"] for line in train)
    assert checkpoint_folder.complete_steps(run / "checkpoints") == [30, 40]
    assert list((run / "tensorboard").glob("events*"))
    card = (run / "final/README.md").read_text()
    assert "held-out rows, step 0" in card and "held-out rows, step 40" in card and "base_model:" in card
    assert not list(run.glob(".*partial*"))

    assert ask(run) == (0, '{"answer": "abab"}\n')
    code, base = ask(run, base=True)
    assert code == 0 and json.loads(base)["answer"] != "abab"
    (run / "final").rename(tmp_path / "elsewhere")
    assert ask(run) == (0, '{"answer": "abab"}\n'), "the newest checkpoint answers while there is no final/"
    code, said = ask(tmp_path)
    assert code == 2 and said.startswith("error: this is not a run")


def test_ranks_that_made_another_global_batch_stop_before_the_weights_change() -> None:
    """Their data or tokenizers differ: each rank counts the whole batch and its own part."""
    from homelab.worker.errors import TrainingError
    from homelab.worker.training.figures_of_step import Figures, refuse_other_batch

    def everyone(counted: list[int], expected: list[int]) -> list[Figures]:
        return [Figures(0.0, own, whole, 0.0, [], None) for own, whole in zip(counted, expected, strict=True)]

    refuse_other_batch(everyone([70, 30], [100, 100]), step=7, rank=1)
    for counted, expected in (([70, 31], [100, 100]), ([70, 30], [100, 99])):
        with pytest.raises(TrainingError, match="not train on the same global batch") as caught:
            refuse_other_batch(everyone(counted, expected), step=7, rank=1)
        assert caught.value.where == "step 7, rank 1" and "run.json" in caught.value.hint


def test_a_node_that_is_asked_saves_after_the_step_and_goes_on(forks: harness.Forks, tmp_path: Path, model: Path) -> None:
    """The first rank of one node sees the request; the rank of the other node saves after the same step. Which steps are saved changes no loss."""
    data = harness.write_jsonl(tmp_path / "d.jsonl", harness.chat_rows(24))
    plain, asked = (
        harness.make_run(tmp_path / name, model, data, train__global_batch=4, checkpoint__every_steps=100) for name in ("plain", "asked")
    )
    requests = [harness.folder_of(asked, "n2", ["n1", "n2"]) / layout.save_request(1, "n2")]

    def ask() -> None:
        for request in requests:
            request.parent.mkdir(parents=True, exist_ok=True)
            request.write_text("{}")

    forks.train(plain, 1, [3, 1], nodes=["n1", "n2"])
    codes, output = forks.run(asked, 1, [3, 1], nodes=["n1", "n2"], prepare=ask)
    assert not any(codes), output
    saved = [checkpoint_folder.complete_steps(harness.folder_of(asked, node, ["n1", "n2"]) / "checkpoints") for node in ("n1", "n2")]
    steps = max(harness.losses(asked, 1))
    assert saved == [[1, steps], [1, steps]] and not any(request.exists() for request in requests), "once, and the request is gone"
    assert harness.losses(asked, 1) == harness.losses(plain, 1)

"""What is merged answers as the adapter did: measured, with the nearer base kept, in a card that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from homelab.worker.errors import WorkerError  # noqa: E402
from homelab.worker.model.build import load_base, load_model  # noqa: E402
from homelab.worker.runtime.recipe import Method, section  # noqa: E402
from homelab.worker.tools import chat, merge, merge_card, merge_room, run_model  # noqa: E402
from homelab.worker.tools.merge_room import Sizes  # noqa: E402
from tests.worker import harness  # noqa: E402

GB = 10**9


@pytest.fixture
def trained(tmp_path: Path, model: Path, data: Path, request: pytest.FixtureRequest) -> Path:
    """A run folder whose final/ has an adapter that does something."""
    kind, _, base = request.param.partition(" ")
    run_dir = harness.make_run(tmp_path / "run", model, data, method__kind=kind, method__base=base or "auto", data__eval_fraction=0.2)
    harness.make_plan(run_dir, 1, [12])
    built = load_model(run_model.task_of(run_model.read_run(run_dir), run_dir), str(model), lambda note: None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    built.save_pretrained(run_dir / "final", save_embedding_layers=False)
    (run_dir / "final/README.md").write_text("---\nlibrary_name: peft\n---\n\n## Data\n\n- x\n")
    return run_dir


@pytest.mark.timeout(120)
@pytest.mark.parametrize("trained", ["qlora", "lora 8bit", "lora"], indirect=True)
def test_the_nearer_merge_is_kept_and_answers_as_the_adapter(trained: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_model.read_run(trained)
    quantised = section(Method, run["recipe"]).quantisation
    made = merge.Merge(trained, trained / "final", "auto").go()
    figures = made["figures"]
    assert list(figures) == [merge_card.ADAPTER, merge_card.name_of("original"), *([merge_card.name_of("dequantised")] if quantised else [])]
    kept = merge_card.name_of("dequantised" if quantised else "original")
    assert made["notes"][0] == f"kept: {kept}" and figures[kept] == pytest.approx(figures[merge_card.ADAPTER], abs=1e-3)
    if quantised:
        assert abs(figures[merge_card.name_of("original")] - figures[merge_card.ADAPTER]) > abs(figures[kept] - figures[merge_card.ADAPTER])
    tokens = torch.arange(3, 40).view(1, -1)
    wanted = chat.load(run, trained, str(model), trained / "final", None).eval()(input_ids=tokens).logits
    whole = load_base(str(trained / "merged"), None, None, torch.float32, None, "").eval()
    assert torch.allclose(wanted, whole(input_ids=tokens).logits, atol=2e-3)
    card = (trained / "merged/README.md").read_text()
    assert f"{kept} (kept)" in card and "library_name: transformers" in card and card.index("## Merge") < card.index("## Data")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in (trained / "merged").iterdir()}
    assert "GB free" in capsys.readouterr().out and not list(trained.glob(".merged*"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("trained", ["lora"], indirect=True)
def test_what_cannot_be_merged(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="not quantised"):
        merge.Merge(trained, trained / "final", "dequantised")
    with pytest.raises(WorkerError, match="there is no adapter"):
        merge.Merge(trained, tmp_path, "auto")
    with pytest.raises(WorkerError, match="is no base"):
        merge.Merge(trained, trained / "final", "x")


def test_a_failure_leaves_the_older_merge(tmp_path: Path) -> None:
    place = tmp_path / "merged"
    with run_model.replaced(place) as partial:
        (partial / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), run_model.replaced(place) as partial:
        (partial / "a").write_text("new")
        raise KeyboardInterrupt
    with pytest.raises(WorkerError, match="No space left"), run_model.replaced(place):
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"] and (place / "a").read_text() == "old"


def choose(**changes: Any) -> merge_room.Room:
    return merge_room.choose(Sizes(7 * 10**9, 2, 2048 * 32000), **{"quantisation": "nf4", "free_memory": 64 * GB, "free_disk": 100 * GB, "where": "/x", **changes})


def test_room_is_counted_before_anything_is_loaded() -> None:
    assert choose().in_fp32 and not choose(free_memory=30 * GB).in_fp32
    assert choose().disk_bytes == pytest.approx(14.3 * GB, rel=0.01)
    with pytest.raises(WorkerError, match=r"needs 2\d\.\d\d GB of memory, and 16\.00 GB are free"):
        choose(free_memory=16 * GB)
    with pytest.raises(WorkerError, match=r"14\.\d\d GB of disk, and 5\.00 GB are free"):
        choose(free_disk=5 * GB)


def test_of_two_equal_merges_the_original_is_kept() -> None:
    figures = {merge_card.ADAPTER: 1.0, merge_card.name_of("original"): 1.1, merge_card.name_of("dequantised"): 0.9}
    assert merge_card.nearer({**figures, merge_card.name_of("original"): 0.9}, ["original", "dequantised"]) == "original"
    assert merge_card.nearer({**figures, merge_card.name_of("dequantised"): 1.05}, ["original", "dequantised"]) == "dequantised"

"""What is merged answers as the adapter did: measured, with the nearer base kept, in a card that says so."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from homelab.shared.recipe import Method
from homelab.worker.checkpoints import saving
from homelab.worker.checkpoints.weights import buffers
from homelab.worker.errors import WorkerError
from homelab.worker.model import adapted
from homelab.worker.model.build import load_base, load_model
from homelab.worker.runtime.recipe import section
from homelab.worker.tools import adapter_delta, chat, merge, merge_card, merge_proof, merge_room, run_model
from homelab.worker.tools.merge_room import Sizes
from tests.worker import harness
from tests.worker.model import odd_models, tiny_models

GB = 10**9


def tied(model: Path, folder: Path) -> Path:
    """The same model, its head the embeddings."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    plain.config.tie_word_embeddings = True
    plain.tie_weights()
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def quantised(model: Path, folder: Path, how: str) -> Path:
    """The same model as bitsandbytes' own files of it: "4bit" or "8bit"."""
    # as published files say
    settings = transformers.BitsAndBytesConfig(**{f"load_in_{how}": True}, bnb_4bit_compute_dtype=torch.bfloat16)
    transformers.AutoModelForCausalLM.from_pretrained(model, quantization_config=settings, device_map={"": "cpu"}).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.fixture
def trained(tmp_path: Path, model: Path, data: Path, request: pytest.FixtureRequest) -> Path:
    """A run folder whose final/ has an adapter that does something."""
    kind, base, targets, stored = [*request.param.split(), *["auto", "all-linear", ""][len(request.param.split()) - 1 :]]
    source = model if targets == "all-linear" else tied(model, tmp_path / "tied")
    if stored:
        source = odd_models.in_eight_float_bits(source, tmp_path)[0] if stored == "fp8" else quantised(source, tmp_path / "stored", stored)
    chosen = targets if targets == "all-linear" else targets.split(",")
    run_dir = harness.make_run(
        tmp_path / "run", source, data, method__kind=kind, method__base=base, method__targets=chosen, data__eval_fraction=0.2
    )
    harness.make_plan(run_dir, 1, [12])
    built = load_model(run_model.task_of(run_model.read_run(run_dir), run_dir), str(source), lambda note: None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
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
    assert list(figures) == [
        merge_card.ADAPTER,
        merge_card.name_of("original"),
        *([merge_card.name_of("dequantised")] if quantised else []),
    ]
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
    with pytest.raises(WorkerError, match="is not a base"):
        merge.Merge(trained, trained / "final", "x")


ENDS = "q_proj,lm_head,embed_tokens"
# how the model's files have its weights
STORED = (("qlora auto", "4bit"), ("lora auto", "4bit"), ("lora 8bit", "8bit"), ("lora auto", "8bit"), ("lora auto", "fp8"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "trained",
    [f"{how} {ENDS}" for how in ("qlora auto", "lora 8bit", "lora auto")] + [f"{how} {ENDS} {stored}" for how, stored in STORED],
    indirect=True,
)
def test_what_the_files_have_decides_what_is_merged_onto(trained: Path) -> None:
    """Adapters on head and embeddings, which are one weight in this model, on every base; and bases whose files are quantised already."""
    run = run_model.read_run(trained)
    path = run["recipe"]["model"]["name"]
    is_stored = Path(path).name == "stored"
    if is_stored:
        with pytest.raises(WorkerError, match="no original weights"):
            merge.Merge(trained, trained / "final", "original").go()
    made = merge.Merge(trained, trained / "final", "auto").go()
    assert any("two tensors" in note for note in made["notes"]) and (merge_card.name_of("original") in made["figures"]) is not is_stored
    tokens = torch.arange(3, 40).view(1, -1)
    wanted = chat.load(run, trained, path, trained / "final", None).eval()(input_ids=tokens).logits
    whole = load_base(str(trained / "merged"), None, None, torch.float32, None, "").eval()
    assert whole.config.tie_word_embeddings is False and getattr(whole.config, "quantization_config", None) is None
    assert torch.allclose(wanted, whole(input_ids=tokens).logits, atol=2e-3)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("trained", ["lora auto q_proj,lm_head"], indirect=True)
@pytest.mark.parametrize("fault", ["the weights in memory", "the files"])
def test_another_model_is_never_kept(trained: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """As a merge that knows nothing of tied weights makes it; and files that are not what was in memory."""
    (trained / "merged").mkdir()
    (trained / "merged/of before").touch()
    if fault == "the files":
        monkeypatch.setattr(adapted, "mark_untied", lambda config: None)
        monkeypatch.setattr(
            saving, "save_whole", lambda model, folder: transformers.AutoModelForCausalLM.from_config(model.config).save_pretrained(folder)
        )
    else:
        monkeypatch.setattr(adapted, "untie", lambda model: None)
    with pytest.raises(WorkerError, match=r"not the trained model: its logits are .* nothing was kept") as refused:
        merge.Merge(trained, trained / "final", "auto").go()
    assert ("written files" in refused.value.message) == (fault == "the files") and "--enable-lora" in refused.value.hint
    assert [path.name for path in (trained / "merged").iterdir()] == ["of before"] and not list(trained.glob(".merged*"))


@pytest.mark.parametrize(("seen", "wanted", "dtype", "is_same"), [
    (1e-6, 0.0, torch.float32, True), (1e-2, 0.0, torch.float32, False), (1e-2, 0.0, torch.bfloat16, True), (0.5, 0.0, torch.bfloat16, False),
    (float("nan"), 0.0, torch.float32, False), (float("nan"), 0.0, torch.bfloat16, False),
])  # fmt: skip
def test_rounding_is_no_other_model(seen: float, wanted: float, dtype: Any, is_same: bool) -> None:
    one, other = torch.full((4, 8), seen), torch.full((4, 8), wanted)
    with contextlib.nullcontext() if is_same else pytest.raises(WorkerError, match="not the trained model"):
        merge_proof.refuse_another(one, other, dtype, what="it", where="/x")


def test_a_loss_that_moved_is_another_model() -> None:
    merge_proof.refuse_other_loss(2.01, 2.0, where="/x")
    for loss in (2.2, 1.8, float("nan")):
        with pytest.raises(WorkerError, match="its loss is"):
            merge_proof.refuse_other_loss(loss, 2.0, where="/x")


@pytest.mark.parametrize("kind", ["lfm2_moe", "deepseek_v3"])
def test_the_biases_of_a_router_keep_all_of_their_digits(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    """Which experts a token takes depends on them, and the base has them in fp32 beside weights in 16 bits."""
    model = load_base(str(tiny_models.folder_with_buffers(kind, tmp_path / kind, tokenizer)), None, None, torch.float32, None, "")
    held = {name: buffer.clone() for name, buffer in buffers(model).items()}
    adapter_delta.rounded(model, torch.bfloat16)
    saving.save_whole(adapter_delta.narrowed(model, torch.bfloat16), tmp_path / "merged")
    again = load_base(str(tmp_path / "merged"), None, None, "auto", None, "")
    assert {weight.dtype for weight in again.parameters()} == {torch.bfloat16}
    assert held and all(buffers(again)[name].equal(buffer) for name, buffer in held.items())


def test_an_error_of_a_library_has_three_parts_too(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> dict[str, Any]:
        return torch.zeros(2) @ torch.zeros(3)

    assert run_model.answered(fails) != 0
    said = capsys.readouterr().err
    assert "RuntimeError" in said and "homelab fetch" in said and "Traceback" not in said and ".py:" in said


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


def test_a_program_that_runs_twice_leaves_the_other_ones_files(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    other = tmp_path / f".merged.{os.getppid()}.partial"
    left = [tmp_path / f".merged.{ended.pid}.partial", tmp_path / f".merged.{ended.pid}.old", tmp_path / f".merged.{os.getpid()}.partial"]
    for folder in (other, *left):
        folder.mkdir()
    with run_model.replaced(tmp_path / "merged"):
        assert other.is_dir() and not left[0].exists() and not left[1].exists()
    assert sorted(tmp_path.iterdir()) == [other, tmp_path / "merged"]


def choose(**changes: Any) -> merge_room.Room:
    return merge_room.choose(
        Sizes(7 * 10**9, 2, 2048 * 32000),
        **{"quantisation": "nf4", "free_memory": 64 * GB, "free_disk": 100 * GB, "where": "/x", **changes},
    )


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

"""The practice model is made once, also by two first runs at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.lab import model


@pytest.mark.parametrize("was_empty", [False, True])
def test_another_process_that_made_it_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, was_empty: bool) -> None:
    folder = tmp_path / "model"

    def convert(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("of this process")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("of the other process")

    monkeypatch.setattr(model, "gguf_folder", lambda: tmp_path)
    monkeypatch.setattr(model, "is_complete", lambda of: (of / "config.json").is_file())
    monkeypatch.setattr(model, "_convert", convert)
    monkeypatch.setattr(model, "_verify", lambda of: None)
    if was_empty:
        folder.mkdir()
    assert model.make_model(folder) == folder
    assert (folder / "config.json").read_text() == "of the other process"
    assert list(tmp_path.iterdir()) == [folder], "nothing is left beside it"

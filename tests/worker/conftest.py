"""A tiny model and a small data file, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker import harness


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """44 chats: with a global batch of 12, the last batch of an epoch has 8."""
    return harness.write_jsonl(tmp_path_factory.mktemp("data") / "chats.jsonl", harness.chat_rows(44))


@pytest.fixture(scope="session")
def tokenizer(model: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="session")
def forks() -> Iterator[harness.Forks]:
    parent = harness.Forks()
    yield parent
    parent.close()

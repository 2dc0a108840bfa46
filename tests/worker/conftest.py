"""A tiny model and a small data file, made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker import harness


@pytest.fixture(autouse=True)
def the_environment_stays() -> Iterator[None]:
    """Tools of the worker set variables of their own process (`homelab.worker.runtime.imports`), which here is that of all tests: ranks of a later one would
    start with them."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost a busy machine far more than tiny tensors."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

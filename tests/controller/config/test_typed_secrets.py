"""Secrets among typed words and in recipes: refused as [environment] refuses them, and said nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomlkit

from homelab.controller.base.errors import InputError
from homelab.controller.config import typed_secrets
from homelab.controller.config.load import load_recipe
from homelab.controller.config.program_command import parsed
from tests.builders import PROJECT_RECIPES, SECTIONS

# Words, and the part of them that nobody may see again.
SECRET = [
    (["--token", "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"], "hf_abc"), (["--hub_token=hf_x"], "hf_x"), (["hf_AbCdEfGhIjKlMnOpQrSt"], "hf_Ab"),
    (["--api-key", "sk-proj-a1b2c3d4e5f6g7h8"], "sk-proj"), (["sk-ant-api03-a1b2c3d4e5f6g7h8"], "sk-ant"), (["--openai_api_key", "whatever"], "whatever"),
    (["ghp_0123456789abcdefABCDEF0123456789abcd"], "ghp_"), (["--wandb_key", "0123456789abcdef0123456789abcdef01234567"], "0123"),
    (["WANDB_API_KEY=0123456789abcdef"], "0123"), (["AWS_SECRET_ACCESS_KEY=a/b+c"], "a/b+c"), (["--id", "AKIAIOSFODNN7EXAMPLE"], "AKIA"),
    (["--remote", "https://user:pass@host/x"], "pass@"), (["s3://key:hunter2@bucket"], "hunter2"), (["--password", "hunter2"], "hunter2"),
    (["--db-password=hunter2"], "hunter2"), (["--header", "Authorization: Bearer abcdef"], "abcdef"), (["+logger.api_key=hunter2"], "hunter2"),
    (["--conf", '{"wandb": {"api_key": "hunter2"}}'], "hunter2"), (["--url", "https://host/x?access_token=hunter2"], "hunter2"),
    (["--authToken", "hunter2"], "hunter2"), (["--secret", "hunter2"], "hunter2"), (["-----BEGIN OPENSSH PRIVATE KEY-----"], "BEGIN"),
    (["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.abc"], "eyJh"), (["xoxb-1234567890-abcdef"], "xoxb"), (["glpat-abcdefghij0123456789"], "glpat"),
]  # fmt: skip
HARMLESS = [
    ["--max_new_tokens", "10"], ["--tokenizer", "meta-llama/Llama-3"], ["--pad_token", "<pad>"], ["--eos_token=</s>"], ["--use_auth_token", "true"],
    ["--push_to_hub_token", "$HF_TOKEN"], ["--token-file", "/home/me/token"], ["--data", "/data/hf_datasets/x"], ["--lib", "sk-learn"], ["--num_tokens", "1e9"],
    ["--revision", "0123456789abcdef0123456789abcdef01234567"], ["--url", "http://host:8080/x"], ["--url", "https://host/x@v1"], ["--tokens_per_batch=4096"],
    ["--token_type_ids"], ["--image_token", "<image>"], ["--key", "value"], ["--lr", "1e-3"], ["--author", "me"], ["--pass_through", "x"], ["--email", "me@host"],
    ["--token", "--lr"], ["git@github.com:me/repo.git"], ["--keys", "a,b"], ["--monkey=ape"], ["--prompt", "The secret is out: a token of love"],
]  # fmt: skip


@pytest.mark.parametrize(("words", "hidden"), SECRET, ids=range(len(SECRET)))
def test_a_secret_in_a_command_is_refused(words: list[str], hidden: str) -> None:
    for line in (["python", "train.py", *words], ["trl", "sft", "--lr", "1", *words], [*words, "python", "train.py"]):
        with pytest.raises(InputError, match="contains a secret") as caught:
            parsed(line)
        assert hidden not in str(caught.value) and "export HF_TOKEN" in caught.value.hint and caught.value.where


@pytest.mark.parametrize(("words", "hidden"), SECRET, ids=range(len(SECRET)))
def test_and_in_a_recipe(tmp_path: Path, words: list[str], hidden: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[script]\npath = "train.py"\nargs = {json.dumps(words)}\n')
    with pytest.raises(InputError, match="a secret must not be in a file") as caught:
        load_recipe(recipe)
    assert hidden not in str(caught.value) and "line 3" in str(caught.value) and "export HF_TOKEN" in str(caught.value)


@pytest.mark.parametrize("key", ["model.name", "data.train", "data.eval", "environment.PROXY"])
def test_wherever_in_a_recipe_it_stands(tmp_path: Path, key: str) -> None:
    section, name = key.split(".")
    recipe = tmp_path / "recipe.toml"
    for value in ("hf_abcdefghijklmnopqrstuvwxyz", "https://me:hunter2@host/x"):
        sections = {**SECTIONS, section: {**SECTIONS.get(section, {}), name: value}}
        recipe.write_text(tomlkit.dumps(sections))
        with pytest.raises(InputError, match=r"a secret must not be|address with a login") as caught:
            load_recipe(recipe)
        assert value not in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize("words", HARMLESS, ids=" ".join)
def test_what_only_looks_like_one_is_taken(words: list[str]) -> None:
    assert parsed(["python", "train.py", *words]).args == tuple(words)


def test_the_recipes_of_the_project_hold_none() -> None:
    for path in PROJECT_RECIPES:
        import tomllib

        assert list(typed_secrets.in_tree(tomllib.loads(path.read_text()))) == [], path

"""Secrets among the words that a person types or writes into a recipe: all of them are kept with the run, and shown by ps on every node. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from homelab.controller.base import secrets

_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_ASSIGNED = re.compile(r"(?:\+{0,2})([A-Za-z_][\w.-]*)[=:](.*)", re.DOTALL)  # KEY=VALUE, and hydra's +a.b=c
_QUERY = re.compile(r"[?&;]([A-Za-z_][\w.-]*)=([^&;#\s]+)")
# What stands behind such a name and is none: a switch, a variable, a path, an address, a number (--max_tokens 10, --token_type 1).
_HARMLESS_VALUE = re.compile(r"(?i)|true|false|yes|no|none|null|auto|\$\w+|\$\{\w+\}|-?[\d.,]+(?:e-?\d+)?|[~/.]\S*|\w+://\S*")
# Tokens of a text, and what is counted of them.
_HARMLESS_NAME = re.compile(
    r"(?i)(?:^|_)(?:n|num|max|min|new|per|bos|eos|pad|unk|sep|cls|mask|image|special|added|extra|stop|start|end|audio|video|vocab)_.*tokens?$"
    r"|tokens?_(?:id|ids|type|level|dim|len|length|count|budget|limit|index)s?$|tokeniz|^tokens$"
)
# Tokens of known services, longer than the names of files and variables that begin alike (hf_datasets, sk-learn).
_FORMS = re.compile(
    r"""
    \bhf_(?:[A-Za-z0-9]{16,}|(?=[A-Za-z]*\d)[A-Za-z0-9]{10,})      # Hugging Face
    | \b(?:sk|pk|rk)[-_](?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{16,}     # OpenAI, Anthropic, Stripe
    | \bgh[pousr]_[A-Za-z0-9]{16,} | \bgithub_pat_[A-Za-z0-9_]{16,} | \bglpat-[A-Za-z0-9_-]{16,}
    | \bA(?:KIA|SIA)[0-9A-Z]{16}\b | \bAIza[A-Za-z0-9_-]{30,} | \bnvapi-[A-Za-z0-9_-]{16,}
    | \bxox[abeprs]-[A-Za-z0-9-]{10,} | \bnpm_[A-Za-z0-9]{16,} | \bpypi-[A-Za-z0-9_-]{30,} | \bwandb_v\d_[A-Za-z0-9_]{16,}
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+
    | -----BEGIN[ A-Z]*PRIVATE[ ]KEY-----
    """,
    re.VERBOSE,
)
_IN_JSON = re.compile(r"""["']([\w.-]+)["']\s*:\s*["']([^"']+)["']""")
LOGIN = "an address with a login"
HELP = "log in on the node (hf auth login, wandb login), or run export HF_TOKEN=... before homelab launch, which gives it to the ranks"


def found(words: Sequence[str]) -> str | None:
    """What of a command's words is a secret, in words that do not say it; None for none."""
    for number, word in enumerate(words):
        # (name, value) of --name=value and name=value; ("name", "") of --name; ("", "") of any other word.
        match = _OPTION.fullmatch(word) or _ASSIGNED.fullmatch(word)
        name, value = (match[1], match[2] or "") if match else ("", "")
        if not value and word.startswith("-") and number + 1 < len(words) and not words[number + 1].startswith("-"):
            value = words[number + 1]
        if name and value and is_secret_name(name) and not _HARMLESS_VALUE.fullmatch(value):
            return f"the value of {name}"
        if what := in_value(word):
            return what
    return None


def in_value(word: str) -> str | None:
    """Whether a text holds what is a secret by its own form: a token of a known service, a private key, a login in an address."""
    if _FORMS.search(word):
        return "a token, by its form"
    if secrets.without_login(word) != word:
        return LOGIN
    pairs = [*(_QUERY.findall(word) if "://" in word else ()), *_IN_JSON.findall(word)]
    return next((f"the value of {name}" for name, value in pairs if is_secret_name(name) and not _HARMLESS_VALUE.fullmatch(value)), None)


def in_tree(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(place, what) of every text of a recipe that is a secret by its form, or behind the name of one in a list of words."""
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value) and (what := found(value)):
        yield place, what
        return
    entries: Iterable[tuple[str | int, Any]] = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    )
    for key, inner in entries:
        if isinstance(inner, str):
            if what := in_value(inner):
                yield (*place, key), what
        else:
            yield from in_tree(inner, (*place, key))


def faults(recipe: dict[str, Any]) -> list[tuple[tuple[str | int, ...], str]]:
    """(place, what is wrong) of every secret in a recipe, but for what [environment] refuses by itself (`homelab.controller.config.environment`)."""
    said = f"a secret must not be in a file that is stored with each run, and every user of a node can see the words of a command: {HELP}"
    return [(place, f"this holds {what}: {said}") for place, what in in_tree(recipe) if (place[0], what) != ("environment", LOGIN)]


def is_secret_name(name: str) -> bool:
    """Whether an option or a key of this name holds a secret."""
    plain = re.sub(r"[.-]", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name))
    return not _HARMLESS_NAME.search(plain) and (
        secrets.names_a_secret(plain) or plain.lower() in ("pwd", "pat", "passphrase", "auth", "authorization")
    )

"""Nothing that looks like a secret leaves in a bug report; everything else stays readable."""

from __future__ import annotations

import json

import pytest

from homelab.controller.base import redact
from homelab.shared.protocol.secrecy import HIDDEN

pytestmark = pytest.mark.timeout(10)

SECRETS = [
    {"environment": {"HF_TOKEN": "s3cret-value"}},
    {"holders": [{"command": "python serve.py --api-key s3cret-value --port 80"}]},
    {"holders": [{"command": "python serve.py --hf-token=s3cret-value"}]},
    {"error": "password: 's3cret-value'"},
    {"proxy": "http://me:s3cret-value@proxy:3128/"},
    {"line": "hf_s3cretvalueABCDEFGH"},
    {"deep": [[{"line": "Authorization is eyJhbGciOiJI.eyJzdWIiOiIxMj.s3cretvalue"}]]},
    {"header": "curl -H 'Authorization: Bearer s3cret-value'"},
    {"login": "curl -u me:s3cret-value http://x"},
    {"short option": "sshpass -ps3cret-value ssh x"},
    {"JSON": '{"token": "s3cret-value"}'},
    {"with a slash": "http_proxy=http://me:s3/cret@s3cret@proxy:3128"},
    {"passphrase": "passphrase=s3cret-value"},
    {"option": "--pass s3cret-value"},
    {"MY_PASS": "s3cret-value"},
    {"cloud": "nvapi-s3cretvalue0123456789"},
    {"file": "-----BEGIN OPENSSH PRIVATE KEY-----\ns3cret-value\n-----END OPENSSH PRIVATE KEY-----"},
]


@pytest.mark.parametrize("value", SECRETS, ids=lambda value: next(iter(value)))
def test_secrets_are_gone(value: dict[str, object]) -> None:
    text = json.dumps(redact.tree(value))
    assert "s3cret" not in text
    assert HIDDEN in text


def test_the_rest_stays_as_it_is() -> None:
    value = {
        "packages": {"tokenizers": "0.23.0", "torch": "2.13.0+cpu"}, "tokens": 512, "longest_tokens": "700",
        "model": {"config": {"eos_token": "</s>", "vocab_size": 49152}}, "token_there": True,
        "executable": "/home/me/.homelab/env/bin/python", "error": "2048 tokens per row, passwordless sudo",
    }  # fmt: skip
    assert redact.tree(value) == value


def test_long_texts_take_no_long_time() -> None:
    for text in ("a" * 200_000, "a-" * 100_000, "token" * 40_000, "://" * 30_000):
        assert redact.text(text)


def test_numbers_are_secrets_too() -> None:
    assert redact.tree({"password": 1234, "eos_token_id": 2, "has_token": True}) == {
        "password": HIDDEN,
        "eos_token_id": 2,
        "has_token": True,
    }

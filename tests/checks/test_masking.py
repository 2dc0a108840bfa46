"""Nothing that looks like a secret leaves in a bug report; everything else stays readable."""

from __future__ import annotations

import json

import pytest

from homelab.checks import masking

pytestmark = pytest.mark.timeout(10)

SECRETS = [
    {"environment": {"HF_TOKEN": "s3cret-value"}},
    {"holders": [{"command": "python serve.py --api-key s3cret-value --port 80"}]},
    {"holders": [{"command": "python serve.py --hf-token=s3cret-value"}]},
    {"error": "password: 's3cret-value'"},
    {"proxy": "http://me:s3cret-value@proxy:3128/"},
    {"line": "hf_s3cretvalueABCDEFGH"},
    {"deep": [[{"line": "Authorization is eyJhbGciOiJI.eyJzdWIiOiIxMj.s3cretvalue"}]]},
    {"file": "-----BEGIN OPENSSH PRIVATE KEY-----\ns3cret-value\n-----END OPENSSH PRIVATE KEY-----"},
]


@pytest.mark.parametrize("value", SECRETS, ids=lambda value: next(iter(value)))
def test_secrets_are_gone(value: dict[str, object]) -> None:
    text = json.dumps(masking.tree(value))
    assert "s3cret" not in text
    assert masking.HIDDEN in text


def test_the_rest_stays_as_it_is() -> None:
    value = {
        "packages": {"tokenizers": "0.23.0", "torch": "2.13.0+cpu"}, "tokens": 512, "longest_tokens": "700",
        "model": {"config": {"eos_token": "</s>", "vocab_size": 49152}}, "token_there": True,
        "python_executable": "/home/me/.homelab/env/bin/python", "error": "2048 tokens per row, passwordless sudo",
    }  # fmt: skip
    assert masking.tree(value) == value

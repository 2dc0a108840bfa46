"""config.json of a model that neither a node nor this machine has, from the hub: one small file, for a plan. Nothing of it is kept."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from dataclasses import dataclass
from typing import Any

from homelab.controller.base import package
from homelab.controller.run import hub_token
from homelab.shared.recipe import Model

_MOST_BYTES = 16 << 20
_LIMIT_S, _SILENT_S = 15.0, 6.0
_TRUE = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads them


@dataclass(frozen=True)
class FetchedConfig:
    """`config`: the file; None where the hub did not give it, and then `note` is why, "" where it was not asked."""

    config: dict[str, Any] | None = None
    note: str = ""


def fetch(model: Model) -> FetchedConfig:
    """The config.json of a model of the hub. Raises nothing: a plan is made without it, too. HF_HUB_OFFLINE is obeyed."""
    if model.is_folder or any((os.environ.get(name) or "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return FetchedConfig()
    if importlib.util.find_spec("huggingface_hub") is None:
        return FetchedConfig(
            note=f"{model.name} was not looked up on the hub, because its library is not on this machine: {package.install('huggingface_hub')}"
        )
    answers: list[FetchedConfig] = []
    # A name lookup has no time limit of its own.
    asking = threading.Thread(target=lambda: answers.append(_asked(model)), daemon=True)
    asking.start()
    asking.join(_LIMIT_S)
    return answers[0] if answers else _without(model, f"no answer within {_LIMIT_S:.0f} s")


def _asked(model: Model) -> FetchedConfig:
    from huggingface_hub import errors, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    content = b""
    try:
        place = hf_hub_url(model.name, "config.json", revision=model.revision, endpoint=os.environ.get("HF_ENDPOINT") or None)
        headers = build_hf_headers(token=hub_token.value() or None)
        with get_session().stream("GET", place, headers=headers, timeout=_SILENT_S, follow_redirects=True) as response:
            hf_raise_for_status(response)
            for part in response.iter_bytes():
                content += part
                if len(content) > _MOST_BYTES:
                    return _without(model, f"it is larger than {_MOST_BYTES} bytes")
        config = json.loads(content)
    except errors.GatedRepoError:
        return _without(
            model,
            f"the hub gives it only to users who accepted its terms at https://huggingface.co/{model.name}; then: export HF_TOKEN=...",
        )
    except errors.RevisionNotFoundError:
        return _without(model, f'the hub knows the model, but no revision "{model.revision}" of it')
    except errors.EntryNotFoundError:
        return _without(
            model, "the hub has no such file there: are they adapters, or GGUF files? [model] name = the model that they belong to"
        )
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return _without(model, "the hub knows no model of that name, or it is private")
    except Exception as error:  # noqa: BLE001 - of the hub's library, or of what it speaks HTTP with: a plan does without
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return _without(model, (lines or [type(error).__name__])[0][:200])
    return FetchedConfig(config) if isinstance(config, dict) else _without(model, "it is not a JSON object")


def _without(model: Model, why: str) -> FetchedConfig:
    return FetchedConfig(note=f"config.json of {model.name} was not fetched from the hub: {why}")

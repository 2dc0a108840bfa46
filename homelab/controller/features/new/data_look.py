"""A look at the rows of a data file on this machine: for a recipe that is not written yet, where no node can be asked."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from homelab.controller.attempt import data_files, inputs
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base import package
from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config.recipe import TrainRecipe, parse_recipe
from homelab.controller.facts.reading import read
from homelab.controller.features.preflight.data_sample import SENT_BYTES
from homelab.shared.protocol import hub_cache
from homelab.shared.protocol.data_rows import beginning, longest_after
from homelab.shared.protocol.file_kind import SUFFIXES
from homelab.shared.protocol.row_forms import PREFERENCE
from homelab.shared.protocol.worker_messages import FileSample, SampleResult
from homelab.shared.recipe import Model
from homelab.shared.recipe.data import Columns

_LIMIT_S = 150.0
HERE = "this machine"
_ANY_LENGTH = 1_048_576
_NO_MODEL = "no/model"


def refuse_no_file(data: str) -> None:
    """Raises InputError for data that is neither a file of this machine nor a data set of the hub."""
    path = Path(os.path.expanduser(data))
    if data.startswith("hub:") or path.is_file():
        return
    try:
        folder = path if path.is_dir() else path.parent
        files = sorted(str(file) for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())
    except OSError:
        files = []
    if path.is_dir():
        hint = (
            Hint("name one of its files: {}", homelab("new", files[0]))
            if files
            else f"put a data file into it ({', '.join(SUFFIXES)}), and name it"
        )
        raise InputError("this is a folder, and the rows of a training are one file", where=data, hint=hint)
    near = difflib.get_close_matches(str(path), files, n=1) or files[:1]
    otherwise = "a data set of the hub is named hub:org/name"
    raise InputError(
        "there is no such file", where=data, hint=Hint("did you mean {}? Otherwise: {}", near[0], otherwise) if near else otherwise
    )


def refuse_bad_rows(file: FileSample | None, data: str, columns: Mapping[str, str] | None = None) -> None:
    """Raises InputError for the first row that no training can read. `columns`: as a person has named them."""
    if file is not None and file.rows_bad:
        bad = file.rows_bad[0]
        # There is no recipe yet that could name the columns: this command does.
        named = re.search(r"\[data\] columns = \{(.+?)\} in the recipe", bad.hint)
        pairs = ",".join(f"{key}={column}" for key, column in re.findall(r'(\w+) = "([^"]*)"', named[1])) if named else ""
        hint: str = Hint("{}", homelab("new", data, "--columns", pairs)) if pairs else bad.hint
        if columns and not pairs:
            wanted = ",".join(f"{key}=COLUMN" for key in columns)
            hint = Hint("name columns that are there: {}", homelab("new", data, "--columns", wanted))
        raise InputError(bad.message, where=bad.where, hint=hint)


def columns_of(words: str) -> dict[str, str]:
    """What --columns says: "prompt=question,completion=answer". Raises InputError for anything else."""
    pairs = [pair.partition("=") for pair in words.split(",")] if words else []
    if any(not key.strip() or not column.strip() for key, _, column in pairs):
        hint: str = homelab("new DATA --columns prompt=question,completion=answer")
        raise InputError("these are no columns: name each as KEY=COLUMN, with commas between", where=f"--columns {words}", hint=hint)
    known = [field.name for field in fields(Columns)]
    if unknown := [key.strip() for key, _, _ in pairs if key.strip() not in known]:
        message = f"no row has a part that is called {unknown[0]}: the part comes first, then your column"
        hint = f"parts are {', '.join(known)}; {homelab('explain recipe.data')} says more"
        raise InputError(message, where=f"--columns {words}", hint=hint)
    return {key.strip(): column.strip() for key, _, column in pairs}


def draft(place: str, model: str, columns: Mapping[str, str] | None = None, *, objective: str = "") -> TrainRecipe:
    """A recipe of this data that is good enough to look at the data with: nothing in it is cut. `objective`: its kind, where rows are known to be for one."""
    train = {"global_batch": 1, "epochs": 1, "learning_rate": 1e-4, "seq_len": _ANY_LENGTH}
    data = {"train": place, **({"columns": dict(columns)} if columns else {})}
    kind = objective or _objective_of(columns or {})
    return parsed(
        {
            "model": {"name": model},
            "data": data,
            "method": {"kind": "lora"},
            "train": train,
            **({"objective": {"kind": kind}} if kind else {}),
        }
    )


def _objective_of(columns: Mapping[str, str]) -> str:
    """The objective whose rows have these columns, as a person has named them."""
    return "dpo" if not columns.keys().isdisjoint(("chosen", "rejected")) else "kto" if "label" in columns else ""


def objective_for(sample: SampleResult | None) -> str:
    """The objective for rows that were read without one: they were refused for saying which of two answers is better, or a label says which answer is good.

    Empty where there is none.
    """
    file = sample.files.get("train") if sample is not None else None
    if file is None:
        return ""
    return "dpo" if file.form == PREFERENCE and file.rows_bad else "kto" if file.labels else ""


def parsed(content: Mapping[str, Any]) -> TrainRecipe:
    """The recipe of what was decided. Raises InputError for a name of a model or of data that none can have."""
    try:
        recipe = parse_recipe(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{'.'.join(map(str, first['loc']))}: {first.get('input')!r}"
        raise InputError(str(first["msg"]).removeprefix("Value error, "), where=where, hint=homelab("new DATA --model org/name")) from error
    assert isinstance(recipe, TrainRecipe)
    return recipe


def of_file(path: Path, model: str, previews: int) -> SampleResult:
    """What is in a data file of this machine. Raises InputError for a file that no training can read."""
    refuse_no_file(str(path))
    recipe = draft(path.name, model or _NO_MODEL)
    items = inputs.of_recipe(recipe, path, folder=path.parent)
    fault = data_files.fault(items)
    if fault is not None:
        raise fault
    sample = here(recipe, items, previews)
    if objective := objective_for(sample):
        sample = here(draft(path.name, model or _NO_MODEL, objective=objective), items, previews)
    if sample.refused:
        raise InputError(sample.refused, where=str(path), hint=homelab("data FILE --model FOLDER"))
    refuse_bad_rows(sample.files.get("train"), str(path))
    return sample


def here(recipe: TrainRecipe, items: Sequence[RecipeInput], previews: int) -> SampleResult:
    """What is in the data files of a recipe that lie on this machine. Raises nothing: why nothing was seen is `refused`.

    Tokens are counted if the model's tokenizer and the library for it are here.
    """
    with tempfile.TemporaryDirectory(prefix="homelab-look-") as folder:
        files = {}
        for item in items:
            if item.local is None:
                continue
            rows, is_whole = beginning(str(item.local), SENT_BYTES)
            path, unread = None, None
            if item.local.suffix == ".parquet":
                path = item.local
                if importlib.util.find_spec("pyarrow") is None:
                    path, unread = None, f"the library that reads Parquet is not on this machine: {package.install('pyarrow')}"
            elif rows is not None:
                path = Path(folder, item.role, item.local.name)  # the look takes unreadable lines out of it
                path.parent.mkdir()
                path.write_bytes(rows)
            longest = [] if is_whole or rows is None else longest_after(str(item.local), len(rows))
            files[item.role] = {
                "path": path and str(path),
                "unread": unread,
                "shown": str(item.local),
                "whole": is_whole,
                "longest": longest,
                "previews": previews,
            }
        question = {
            "files": files,
            "data": asdict(recipe.data),
            "seq_len": recipe.train.seq_len,
            "model": _tokenizer(recipe.model),
            "revision": None,
        }
        return _asked(question)


def why_not_counted(model: str) -> str:
    """Why `of_file` counts no tokens for this model, with what helps."""
    if not model:
        return "name the model that reads them: --model FOLDER"
    if importlib.util.find_spec("transformers") is None:
        return f"the library that reads a tokenizer is not on this machine: {package.install('transformers')}"
    return f"{model} is no folder with a tokenizer here, and not in the cache of the hub"


def _tokenizer(model: Model) -> str | None:
    """The model's folder on this machine; None without one, or without the library that reads it."""
    if importlib.util.find_spec("transformers") is None:
        return None
    folder = str(Path(model.name).expanduser()) if model.is_folder else hub_cache.snapshot(model.name, model.revision)
    return folder if folder and any(Path(folder, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")) else None


def _asked(question: dict[str, object]) -> SampleResult:
    command = [sys.executable, "-P", "-m", "homelab.worker.tools.data_sample"]
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=_LIMIT_S, errors="replace", env=dict(os.environ)
        )
        answer = json.loads((done.stdout.strip().splitlines() or [""])[-1])
    except subprocess.TimeoutExpired:
        return SampleResult(node=HERE, refused=f"reading a sample of the data took longer than {_LIMIT_S:.0f} s")
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return SampleResult(node=HERE, refused=f"reading a sample of the data failed: {last[:500]}")
    return read(SampleResult, {**answer, "node": HERE})

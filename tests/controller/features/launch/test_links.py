"""Symbolic links that leave the folder that is sent: refused by name, wherever files are gathered, and nothing of them is read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from homelab.controller.attempt import inputs
from homelab.controller.base.errors import InputError
from homelab.controller.config.program_command import parsed
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.features.launch import project_copy
from homelab.controller.features.setup import model_source
from tests import builders

pytestmark = pytest.mark.timeout(60)
SECRET = "canary"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a program; beside it what nobody has named."""
    (tmp_path / "home" / "keys").mkdir(parents=True)
    (tmp_path / "home" / "keys" / "id_ed25519").write_text(SECRET)
    (tmp_path / "home" / "secret.py").write_text(f"import os  # {SECRET}")
    folder = tmp_path / "home" / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "__init__.py").write_text("")
    (folder / "train.py").write_text("import lib, part\n")
    (folder / "part.py").write_text("")
    (folder / ".env").write_text(SECRET)
    return folder


def link(place: Path, target: str) -> Path:
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    return place


LINKS: dict[str, Callable[[Path], Path]] = {
    "a file": lambda folder: link(folder / "data.txt", "../keys/id_ed25519"),
    "an absolute one": lambda folder: link(folder / "data.txt", str(folder.parent / "keys" / "id_ed25519")),
    "a folder": lambda folder: link(folder / "keys", "../keys"),
    "a folder, absolute": lambda folder: link(folder / "keys", str(folder.parent / "keys")),
    "below a folder": lambda folder: link(folder / "lib" / "data.txt", "../../keys/id_ed25519"),
    "a link to a link": lambda folder: (link(folder / "one.txt", "two.txt"), link(folder / "two.txt", "../keys/id_ed25519"))[0],
    "through a linked folder": lambda folder: (link(folder.parent / "way", "keys"), link(folder / "data.txt", "../way/id_ed25519"))[1],
    "out and in again": lambda folder: link(folder / "data.txt", f"../../home/{folder.name}/../keys/id_ed25519"),
    "to what is hidden": lambda folder: link(folder / "data.txt", ".env"),
    "to nowhere": lambda folder: link(folder / "data.txt", "../nothing"),
    "in a circle": lambda folder: link(folder / "data.txt", "data.txt"),
    "an imported module": lambda folder: link(folder / "part.py", "../secret.py"),
    "a module of a package": lambda folder: link(folder / "lib" / "more.py", "../../secret.py"),
}  # fmt: skip


@pytest.mark.parametrize("with_git", [False, True], ids=["folder", "git"])
@pytest.mark.parametrize("make", LINKS.values(), ids=LINKS)
def test_a_typed_command_does_not_take_them_along(project: Path, make: Callable[[Path], Path], with_git: bool) -> None:
    place = make(project)
    if with_git:
        subprocess.run(["git", "init", "-q", str(project)], check=True)
    refused = pytest.raises(InputError, match=r"the link .* (leads out of the folder|leads to a hidden file|leads nowhere)")
    with refused as caught, project_copy.recipe_of(parsed(["train.py"]), project):
        pass
    assert str(place.name) in caught.value.message and ("cp -RL" in caught.value.hint or "rm " in caught.value.hint)
    if "cp -RL" in caught.value.hint and "hidden" not in caught.value.message:  # the fix, as it is written
        subprocess.run(["sh", "-c", caught.value.hint.split(": ", 1)[1].split(";")[0]], check=True, cwd=project)
        (project / "two.txt").unlink(missing_ok=True)
        with project_copy.recipe_of(parsed(["train.py"]), project):
            pass


def test_a_link_that_git_leaves_out_stays_here(project: Path) -> None:
    link(project / "keys", "../keys")
    (project / ".gitignore").write_text("keys\n")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    with project_copy.recipe_of(parsed(["train.py"]), project) as recipe:
        assert not (recipe.parent / "keys").exists()


@pytest.mark.parametrize(
    "make", [LINKS[name] for name in ("below a folder", "an imported module", "a module of a package", "a link to a link")]
)
def test_nor_does_a_script(project: Path, make: Callable[[Path], Path]) -> None:
    make(project)
    recipe = project / "recipe.toml"
    for files in (["lib", "part.py", *(["one.txt"] if (project / "one.txt").is_symlink() else [])],):
        with pytest.raises(InputError, match=r"the link|is not in the folder of the script"):
            inputs.of_recipe(parse_recipe({"script": {"path": "train.py", "files": files}}), recipe)


def test_links_inside_of_the_folder_are_files_of_it(project: Path) -> None:
    link(project / "same.py", "part.py")
    link(project / "lib" / "up.py", "../part.py")
    with project_copy.recipe_of(parsed(["train.py"]), project) as recipe:
        assert (recipe.parent / "same.py").is_file() and not (recipe.parent / "same.py").is_symlink()
    names = [
        item.inside
        for item in inputs.of_recipe(parse_recipe({"script": {"path": "train.py", "files": ["same.py"]}}), project / "recipe.toml")
    ]
    assert "lib/up.py" in names


def test_a_model_folder_of_the_hubs_cache_is_made_of_links_and_others_are_refused(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / ("a" * 40)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / ("b" * 40)).write_text("{}")
    (tmp_path / "key").write_text(SECRET)
    link(snapshot / "config.json", f"../../blobs/{'b' * 40}")
    model = builders.recipe(model={"name": str(snapshot)}).model
    assert model is not None and [part.name for part in model_source.of_recipe(model, lambda text: None).files] == ["config.json"]
    link(snapshot / "tokenizer.json", "../../key")
    with pytest.raises(InputError, match=r"the link tokenizer\.json leads out"):
        model_source.of_recipe(model, lambda text: None)

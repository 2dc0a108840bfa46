"""The guide's table of models and cards (homelab/docs/new.md): what `homelab new` chooses today."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages.model_recipes import CARDS, HELD, ROWS

import homelab
from homelab.controller.config.cluster import Cluster, Gpu, Node
from homelab.controller.features.new import data_look, training_choice
from homelab.controller.features.new.training_choice import Seen, Wish
from homelab.controller.planning.inputs import PlanInputs
from tests.builders import PORT, RUN, address_of

PAGE = (Path(homelab.__file__).parent / "docs" / "new.md").read_text(encoding="utf-8")
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Which model fits")[2].splitlines()
    if line.startswith("|")
]
HEAD, MODELS = LINES[0][1:], {cells[0].strip("`"): cells[1:] for cells in LINES[2:]}


def cluster_of(heading: str) -> Cluster:
    """ "12 and 8 GB": two machines with a card each."""
    sizes = [int(size) for size in heading.removesuffix(" GB").split(" and ")]
    gpus = [Gpu(model=CARDS[size], vram_gb=float(size)) for size in sizes]
    return Cluster(nodes=tuple(Node(name=f"n{number}", host=address_of(f"n{number}"), gpus=(gpu,)) for number, gpu in enumerate(gpus)))


# The largest and the smallest take other ways, and every third one between them.
QUICK = {*list(MODELS)[::3], list(MODELS)[-1]}


@pytest.mark.parametrize("model", [model if model in QUICK else pytest.param(model, marks=pytest.mark.thorough) for model in MODELS])
def test_the_table_says_what_new_chooses(model: str, tmp_path: Path) -> None:
    said = []
    for heading in HEAD:
        inputs = PlanInputs(cluster_of(heading), data_look.draft("x.jsonl", model), {}, RUN, PORT)
        chosen = training_choice.choose(Wish("x.jsonl", model, tmp_path / "r.toml", offline=True), model, Seen(None, (), inputs, ()), ROWS)
        whole = chosen.recipe.train.seq_len >= ROWS.longest
        said.append(HELD[chosen.recipe.method.kind] if chosen.is_resident and whole else "no")
    assert said == MODELS[model]

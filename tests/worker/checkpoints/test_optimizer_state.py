"""The optimizer's state from a checkpoint: paged state is paged again, and goes on as if nothing had been."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
bitsandbytes = pytest.importorskip("bitsandbytes")

from homelab.worker.checkpoints import optimizer_state

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPES = ((400, 300), (100, 50), (7,))  # paged, in 8 bits, too small for 8 bits


def parameters() -> list[Any]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def stepped(optimizer: Any, trained: list[Any], seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def made(trained: list[Any]) -> Any:
    return bitsandbytes.optim.AdamW(trained, lr=0.1, optim_bits=8, is_paged=True)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Paged memory without a card: tensors that carry its mark; the list is of what was brought to the card before it was used."""

    def get_paged(*shape: int, dtype: Any, device: Any) -> Any:
        page = torch.full(shape, 9, dtype=dtype)
        page.is_paged, page.page_deviceid = True, device.index
        return page

    found: list[Any] = []
    monkeypatch.setattr(bitsandbytes.functional, "get_paged", get_paged)
    monkeypatch.setattr(bitsandbytes.functional, "prefetch_tensor", found.append)
    return found


def test_large_state_is_paged_after_loading_and_the_next_step_is_the_same(tmp_path: Path, fetched: list[Any]) -> None:
    trained = parameters()
    before = made(trained)
    stepped(before, trained, 1)
    assert fetched == [], "on a CPU nothing is paged by itself"
    for values in before.state.values():
        values["state1"].is_paged = True  # as a card's own pages are saved
    torch.save(before.state_dict(), tmp_path / "optimizer.pt")
    for values in before.state.values():
        del values["state1"].is_paged

    resumed = copy.deepcopy(trained)
    after = made(resumed)
    pages = after.page_mng.paged_tensors
    known = len(pages)
    optimizer_state.load_paged(after, torch.load(tmp_path / "optimizer.pt", map_location="cpu", mmap=True, weights_only=True))
    large, small, tiny = (after.state[parameter] for parameter in resumed)
    assert [getattr(state[name], "is_paged", False) for state in (large, small, tiny) for name in ("state1", "state2")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    assert {id(page) for page in pages[known:]} == {id(large["state1"]), id(large["state2"])}
    for old, new in zip(trained, resumed, strict=True):
        for name, value in before.state[old].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after.state[new][name])), name
    stepped(before, trained, 2)
    stepped(after, resumed, 2)
    assert [tuple(page.shape) for page in fetched] == [SHAPES[0]] * 2
    assert all(torch.equal(old, new) for old, new in zip(trained, resumed, strict=True))
    del pages[known:]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_is_read_into_ram_and_keeps_no_page_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    trained = parameters()
    before = torch.optim.AdamW(trained, lr=0.1)
    stepped(before, trained, 1)
    torch.save(before.state_dict(), tmp_path / "optimizer.pt")
    asked: list[Any] = []
    really = torch.load

    def loaded(path: Path, **options: Any) -> Any:
        asked.append(options["map_location"])
        return really(path, **options)

    monkeypatch.setattr(torch, "load", loaded)
    resumed = copy.deepcopy(trained)
    after = torch.optim.AdamW(resumed, lr=0.1)
    optimizer_state.load(after, tmp_path / "optimizer.pt", torch.device(device))
    assert asked == ["cpu"]
    assert after.param_groups[0]["foreach"] is None
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    stepped(before, trained, 2)
    stepped(after, resumed, 2)
    assert all(torch.equal(old, new) for old, new in zip(trained, resumed, strict=True))


def test_the_kernels_are_those_of_this_attempt(tmp_path: Path) -> None:
    """A run that began on a CPU, or in fp16, goes on with what the plan of now counts on."""
    trained = parameters()
    before = torch.optim.AdamW(trained, lr=0.1, foreach=True)
    stepped(before, trained, 1)
    torch.save(before.state_dict(), tmp_path / "optimizer.pt")
    after = torch.optim.AdamW(copy.deepcopy(trained), lr=0.2, fused=True)
    optimizer_state.load(after, tmp_path / "optimizer.pt", torch.device("cpu"))
    group = after.param_groups[0]
    assert (group["fused"], group["foreach"], group["lr"]) == (True, None, 0.1)


def test_a_window_takes_the_state_of_a_checkpoint_and_no_rate_or_decay_of_it(tmp_path: Path) -> None:
    """Of the run that is checked: a forger's checkpoint says 1 % more, and the optimizer would go on with it."""

    def made_with(rate: float, decay: float) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(parameters(), lr=rate, weight_decay=decay)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    forged, forged_schedule = made_with(1.01e-3, 0.0)
    for seed in (1, 2):
        stepped(forged, forged.param_groups[0]["params"], seed)
        forged_schedule.step()
    own, schedule = made_with(1e-3, 0.1)
    with optimizer_state.kept_as_made(own, schedule):
        own.load_state_dict(forged.state_dict())
        schedule.load_state_dict(forged_schedule.state_dict())
    (group,) = own.param_groups
    assert (
        group["lr"] == pytest.approx(1e-3 / 3) == schedule.get_last_lr()[0] and group["weight_decay"] == 0.1 and schedule.base_lrs == [1e-3]
    )
    assert all(float(values["step"]) == 2 for values in own.state.values()), "the state is loaded"
    stepped(own, group["params"], 3)
    schedule.step()
    assert group["lr"] == pytest.approx(1e-3 / 4)

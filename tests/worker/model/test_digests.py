"""The digest of weights: every bit counts, and its place; what lies elsewhere in memory, or on another device, is the same."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from homelab.worker.model import weight_digests

pytestmark = pytest.mark.usefixtures("one_thread")


def digest(tensor: torch.Tensor) -> str:
    return weight_digests.each({"a": tensor})["a"]


def by_hand(data: bytes, kind: str, shape: tuple[int, ...]) -> str:
    """The definition once more, in Python's own numbers."""
    drawn = hashlib.shake_256(b"homelab weights").digest(8 << 16)
    multipliers = [int.from_bytes(drawn[place : place + 8], "little") | 1 for place in range(0, len(drawn), 8)]
    found = hashlib.sha256(f"{kind} {shape}\n".encode())
    for start in range(0, len(data), 4 << 16):
        block = data[start : start + (4 << 16)]
        block += bytes(-len(block) % 4)
        words = [int.from_bytes(block[place : place + 4], "little", signed=True) for place in range(0, len(block), 4)]
        found.update((sum(word * number for word, number in zip(words, multipliers, strict=False)) % (1 << 64)).to_bytes(8, "little"))
    return found.hexdigest()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (1 << 17, 1), (70000, 3)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_what_it_says(shape: tuple[int, ...], kind: torch.dtype) -> None:
    tensor = (torch.randn(shape) * 50).to(kind)
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert digest(tensor) == by_hand(data, str(kind), shape)


def test_every_bit_counts_and_its_place() -> None:
    whole = torch.randn(300_000).to(torch.bfloat16)
    found = {digest(whole)}
    for place, bit in ((0, 0), (0, 7), (131_071, 3), (131_072, 3), (599_999, 7)):
        other = whole.clone()
        other.view(torch.uint8)[place] ^= 1 << bit
        found.add(digest(other))
    for first, second in ((0, 1), (0, 2), (0, 131_072)):  # within a word, within a block, of two blocks
        other = whole.clone()
        other[first], other[second] = whole[second].item(), whole[first].item()
        assert not torch.equal(other, whole)
        found.add(digest(other))
    found |= {
        digest(whole[:-1]),
        digest(whole.view(3, -1)),
        digest(whole.view(torch.int16)),
        digest(torch.nn.functional.pad(whole, (0, 1))),
    }
    assert len(found) == 13


def test_where_it_lies_does_not_count() -> None:
    whole = torch.arange(2_500_001, dtype=torch.int32).view(torch.uint8)[:-2]
    assert digest(whole) == digest(whole.clone())
    for start in range(1, 4):  # a slice of a file that is mapped into memory
        assert digest(whole[start:]) == digest(whole[start:].clone())
    square = torch.randn(40, 60)
    assert digest(square.t()) == digest(square.t().contiguous())


def test_names_count_and_a_tied_weight_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    sums = weight_digests._sums
    monkeypatch.setattr(weight_digests, "_sums", lambda tensor: read.append(len(tensor)) or sums(tensor))
    first, second = torch.ones(4), torch.zeros(4)
    found = weight_digests.each({"a": first, "b": second, "c": first})
    assert found["a"] == found["c"] != found["b"] and len(read) == 2
    assert weight_digests.joined(found) == weight_digests.joined(dict(reversed(found.items())))
    assert weight_digests.joined(found) != weight_digests.joined({"a": found["b"], "b": found["a"], "c": found["c"]})


def quantised(weights: torch.Tensor) -> Any:
    """A model with a frozen matrix in NF4 and a trained one."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(weights.shape[1], weights.shape[0], bias=False, quant_type="nf4", compress_statistics=True)
    layer.weight = bitsandbytes.nn.Params4bit(weights.clone(), requires_grad=False, quant_type="nf4", module=layer)
    with weight_digests.noting_sources():
        layer.to("cpu")
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"base": layer, "adapter": torch.nn.Linear(2, 2)})


def test_of_quantised_weights_both_what_was_read_and_what_is_held_count() -> None:
    weights = torch.randn(64, 256)
    model, same = quantised(weights), quantised(weights)
    read, held = weight_digests.base(model)
    assert weight_digests.base(same) == (read, held) and read != held
    state = same["base"].weight.quant_state
    for change in (
        lambda: state.offset.mul_(1 + 1e-6),
        lambda: same["base"].weight.data[3].bitwise_xor_(1),
        lambda: state.state2.absmax.mul_(2),
    ):
        change()
        now = weight_digests.base(same)
        assert now[0] == read and now[1] != held, "another device's rounding, or a fault of memory"
        held = now[1]
    moved = weights.clone()
    moved[5, 7] = torch.nextafter(moved[5, 7], torch.tensor(9.0))  # a bit that no code and no scale shows
    other = quantised(moved)
    assert weight_digests.base(other)[1] == weight_digests.base(model)[1] and weight_digests.base(other)[0] != read
    assert weight_digests.trained(other) == weight_digests.trained(model)


def in_8_bits(weights: torch.Tensor) -> Any:
    """A frozen matrix in 8 bits."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear8bitLt(weights.shape[1], weights.shape[0], bias=False, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(weights.clone(), requires_grad=False, has_fp16_weights=False)
    with weight_digests.noting_sources():
        layer.to("cpu")
    assert layer.weight.dtype == torch.int8
    return torch.nn.ModuleDict({"base": layer})


def test_of_8_bits_both_what_was_read_and_what_is_held_count() -> None:
    """One code that a card rounds otherwise made the ranks refuse each other as if their files differed."""
    weights = torch.randn(64, 256, dtype=torch.float16)
    model, same = in_8_bits(weights), in_8_bits(weights)
    read, held = weight_digests.base(model)
    assert weight_digests.base(same) == (read, held) and read != held
    for change in (lambda: same["base"].weight.data[3, :1].add_(1), lambda: same["base"].weight.SCB.mul_(1 + 1e-6)):
        change()
        now = weight_digests.base(same)
        assert now[0] == read and now[1] != held, "another device's rounding"
        held = now[1]
    assert weight_digests.base(in_8_bits(weights * 2))[0] != read


def test_what_is_trained_is_not_the_base() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model[0].requires_grad_(False)
    before = weight_digests.base(model)[0], weight_digests.trained(model)
    with torch.no_grad():
        model[1].weight += 1
    assert weight_digests.base(model)[0] == before[0] and weight_digests.trained(model) != before[1]
    model[1].running_mean += 1
    assert weight_digests.base(model)[0] != before[0]


def test_bitsandbytes_is_left_as_it_was() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    names = ("quantize_4bit", "int8_vectorwise_quant")
    before = [getattr(functional, name) for name in names]
    with pytest.raises(KeyError), weight_digests.noting_sources():
        assert not any(getattr(functional, name) is was for name, was in zip(names, before, strict=True))
        raise KeyError
    assert [getattr(functional, name) for name in names] == before


def test_a_card_finds_the_same_digest() -> None:
    if not torch.cuda.is_available():  # asked here: while tests are collected it would keep forked processes from their card
        pytest.skip("needs a card")
    whole = torch.randn(5_000_003)
    assert digest(whole) == digest(whole.cuda())

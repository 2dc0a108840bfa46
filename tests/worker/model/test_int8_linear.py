"""An 8-bit base: what a row gives does not depend on its neighbours, and its scales are in the digests."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
bitsandbytes = pytest.importorskip("bitsandbytes")

from typing import Any

from homelab.shared.protocol import quantisation
from homelab.worker.model import build, int8_linear, weight_digests

pytestmark = pytest.mark.timeout(60)


def layer() -> int8_linear.Int8Linear:
    made = bitsandbytes.nn.Linear8bitLt(64, 32, bias=True, has_fp16_weights=False, threshold=6.0)
    torch.manual_seed(1)
    made.weight = bitsandbytes.nn.Int8Params(torch.randn(32, 64), requires_grad=False)
    made = made.to("cpu")
    model = torch.nn.Sequential(made)
    int8_linear.install(model)
    return model[0]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """bitsandbytes' own product with a threshold does: a neighbour's outlier moves its column out of the 8 bits of all rows."""
    eight_bit, row, neighbour = layer(), torch.randn(1, 64), torch.randn(1, 64)
    neighbour[0, 3] = 50.0
    together = torch.cat([row, neighbour])
    assert torch.allclose(eight_bit(together)[:1], eight_bit(row), atol=1e-5)
    eight_bit.eval()
    own = bitsandbytes.nn.Linear8bitLt.forward
    assert not torch.allclose(own(eight_bit, together)[:1], own(eight_bit, row), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradient_are_those_of_the_dequantised_matrix(dtype: Any) -> None:
    eight_bit = layer()
    matrix = bitsandbytes.functional.int8_vectorwise_dequant(eight_bit.weight.data, eight_bit.weight.SCB)
    assert (matrix - torch.nn.init.normal_(torch.empty(32, 64), generator=torch.Generator().manual_seed(1))).abs().max() < 0.02
    one, other = (torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_() for _ in range(2))
    result, expected = eight_bit(one), torch.nn.functional.linear(other, matrix.to(dtype), eight_bit.bias.to(dtype))
    assert result.dtype == dtype and torch.allclose(result, expected, *((1e-5, 1e-4) if dtype == torch.float32 else (0.02, 0.1)))
    result.sum().backward()
    expected.sum().backward()
    assert torch.allclose(one.grad, other.grad, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_over_the_matrix_gives_the_bits_of_two(dtype: Any) -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8).repeat(64, 1)
    scales = torch.randn(64, generator=torch.Generator().manual_seed(3)).abs()
    two = codes.to(dtype).mul_(scales.unsqueeze(1) * (1 / 127))
    assert torch.equal(int8_linear.dequantised(codes, scales, dtype), two)


def test_the_base_of_a_model_and_its_digest(model: Path) -> None:
    """All linear layers but the head; a scale that differs in one bit is another base."""
    loaded = build.load_base(str(model), None, quantisation.INT8, torch.float32, None, "here")
    packed = {name: part for name, part in loaded.named_modules() if isinstance(part, int8_linear.Int8Linear)}
    assert len(packed) == 14 and not isinstance(loaded.get_output_embeddings(), int8_linear.Int8Linear)
    assert all(part.weight.dtype == torch.int8 and not part.weight.requires_grad for part in packed.values())
    before = weight_digests.base(loaded)
    part = next(iter(packed.values()))
    part.weight.SCB[0] = torch.nextafter(part.weight.SCB[0], torch.tensor(9.0))
    assert weight_digests.base(loaded) != before
    loaded(input_ids=torch.arange(3, 20).unsqueeze(0))
    part.weight.SCB[0] = torch.nextafter(part.weight.SCB[0], torch.tensor(0.0))
    assert weight_digests.base(loaded) == before, "a pass changes nothing"
    with weight_digests.noting_sources():
        noted = build.load_base(str(model), None, quantisation.INT8, torch.float32, None, "here")
    read, held = weight_digests.base(noted)
    assert held == before[1] and read not in (held, before[0]), "as transformers loads it, the scales know what was quantised"

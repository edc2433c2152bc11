"""Places of choices on the GPU: the twin's numbers, at sizes of every number of tiles, however the choices fall."""

from __future__ import annotations

import pytest
import torch

from mxep import kernels, reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("R", [0, 1, 511, 512, 513, 70001])
@pytest.mark.parametrize(("L", "C", "alignment"), [(1, 1, 32), (32, 8, 32), (7, 3, 0), (300, 8, 128), (768, 2, 1), (2048, 6, 1)])
def test_the_twin(R: int, L: int, C: int, alignment: int) -> None:
    generator = torch.Generator("cuda").manual_seed(R + L)
    for kind in ("random", "one expert", "nowhere", "sorted"):
        experts = torch.randint(-L, L, (R, C), device="cuda", generator=generator)
        if kind == "one expert":
            experts.fill_(L - 1)
        elif kind == "nowhere":
            experts.fill_(2**32)  # not 0 of 32 bits
        elif kind == "sorted":
            experts = experts.flatten().sort().values.view(R, C)
        num_places = R * C + L * max(alignment, 1) + 5
        for chosen in (experts, experts.int() if kind != "nowhere" else experts.clamp(max=L).int()):
            want = reference.place_choices(chosen, L, alignment, num_places)
            for got, told in zip(kernels.place_choices(chosen, L, alignment, num_places), want, strict=True):
                assert torch.equal(got, told), f"{kind} {chosen.dtype}"


def test_strided_choices_and_the_same_again() -> None:
    table = torch.randint(-1, 8, (4097, 10), dtype=torch.int32, device="cuda")
    want = reference.place_choices(table[:, :4].contiguous(), 8, 4, 20000)
    for _ in range(5):
        for got, told in zip(kernels.place_choices(table[:, :4], 8, 4, 20000), want, strict=True):
            assert torch.equal(got, told)


def test_too_many_experts() -> None:
    with pytest.raises(ValueError, match="place_choices: 2049 experts on one GPU, want at most 2048"):
        kernels.place_choices(torch.zeros(1, 1, dtype=torch.int64, device="cuda"), 2049, 0, 1)

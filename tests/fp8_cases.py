"""MX operands for tests of the FP8 path: random bytes with every special block, quantised data of known spread, ragged groups."""

from __future__ import annotations

import random

import torch

from mxep import reference
from mxep.ops.quantize.reference import scale_to_float32

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def mx_bytes(rows: int, width: int, device: str = "cpu", seed: int = 0, wild: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Random MX bytes (rows, width). wild: distant scales, subnormals, zero blocks with and without scale 0, NaN blocks, zero rows."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"dtype": torch.uint8, "device": device, "generator": generator}
    data = torch.randint(0, 256, (rows, width), **options)
    data = torch.where((data & 0x7F) == 0x7F, data - 1, data)  # no NaN codes in blocks that are none
    scale = torch.randint(118, 126, (rows, width // 32), **options)
    if wild:
        chance = torch.rand(scale.shape, device=device, generator=generator)
        third = (torch.arange(rows, device=device) % 3 == 0)[:, None]
        scale = torch.where((chance < 0.01) & third, torch.randint(1, 255, scale.shape, **options), scale)
        scale = torch.where((chance > 0.02) & (chance < 0.04), scale - 14, scale)
        small = (chance > 0.06) & (chance < 0.09)
        data = torch.where(small.repeat_interleave(32, 1), data & 0x87, data)  # subnormals only
        zero = (chance > 0.10) & (chance < 0.14)
        zero[5::97] = True
        data = torch.where(zero.repeat_interleave(32, 1), data & 0x80, data)
        scale = torch.where(zero & (chance < 0.135), 0, scale)
        scale = torch.where((chance > 0.16) & (chance < 0.165), 0, scale)  # scale byte 0 over data that is not zero
        nan = (chance > 0.1999) & (chance < 0.2010)
        data = torch.where(nan.repeat_interleave(32, 1), 0x7F, data)
        scale = torch.where(nan, 255, scale)
    return data.to(torch.uint8).view(E4M3), scale.to(torch.uint8).view(E8M0)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.quantize(x, "rceil")


def float64(qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The exact numbers of MX bytes."""
    return (qdata.double().unflatten(-1, (-1, 32)) * scale_to_float32(scale).double()[..., None]).flatten(-2)


def ragged(groups: int, rows: int, seed: int) -> list[int]:
    """END offsets of groups of random sizes: empty ones, tiny ones, rows left over."""
    rng, ends, left = random.Random(seed), [], rows
    for _ in range(groups):
        size = min(rng.choice((0, 1, 31, rng.randint(1, 140), rng.randint(1, max(1, rows // 2)))), left)
        left -= size
        ends.append(rows - left)
    return ends

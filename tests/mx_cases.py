"""Difficult inputs of a quantiser, and the comparison by bytes."""

from __future__ import annotations

import torch

MODES = ("rceil", "floor")
# Magnitudes around which a scale or a rounding changes, as float32 bits: RCEIL's boundaries, e4m3 ties, ends of the range.
_EDGE_BITS = (
    0x00000000, 0x00000001, 0x00000380, 0x00400000, 0x00400001, 0x007FFFFF, 0x00800000, 0x00800001, 0x03FFFFFF, 0x04000000,
    0x045FFFFF, 0x04600000, 0x04600001, 0x04600002, 0x04DFFFFF, 0x04E00000, 0x04E00001, 0x3F800000, 0x3F880000, 0x3F980000,
    0x43DFFFFF, 0x43E00000, 0x43E00001, 0x43E08000, 0x43FF8000, 0x44000000, 0x7EFFFFFF, 0x7F000000, 0x7F000001, 0x7F7FFFFF,
    0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF,
)  # fmt: skip


def _edges(generator: torch.Generator) -> torch.Tensor:
    """(number of edges * 2, 64): every edge as the largest magnitude of its block, with either sign, among smaller values."""
    edges = torch.tensor(_EDGE_BITS, dtype=torch.int64).repeat(2)[:, None]
    below = (edges.clamp(max=0x7F7FFFFF) * torch.rand(edges.shape[0], 64, generator=generator)).long()
    sign = torch.randint(0, 2, below.shape, generator=generator) << 31
    below[:, 7] = edges[:, 0]
    below[:, 40] = edges[:, 0]
    return (below | sign).where(below | sign < 1 << 31, (below | sign) - (1 << 32)).int().view(torch.float32)


def _all_exponents(generator: torch.Generator) -> torch.Tensor:
    """(255 * 7, 32): blocks whose largest magnitude has each exponent and each of seven mantissas."""
    mantissas = torch.tensor((0, 1, 0x400000, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF))
    largest = ((torch.arange(255) << 23)[:, None] + mantissas).reshape(-1, 1)
    bits = (largest * torch.rand(largest.shape[0], 32, generator=generator)).long()
    bits[:, 5] = largest[:, 0]
    return bits.int().view(torch.float32)


def quantizer_inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Named (rows, width) inputs, all of `dtype`, on the CPU."""
    g = torch.Generator().manual_seed(0)

    def normal(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=g)

    cases = {
        "random": normal(129, 512),
        "heavy": normal(127, 416) * torch.exp(6 * normal(127, 416)),
        "subnormal": normal(64, 256) * torch.exp2(torch.randint(-149, -110, (64, 256), generator=g).float()),
        "tiny": normal(64, 256) * torch.exp2(torch.randint(-132, -114, (64, 1), generator=g).float()),
        "huge": normal(33, 256) * 2.0**126,
        "zero": torch.zeros(3, 64) * torch.tensor([1.0, -1.0]).repeat(32),
        "edges": _edges(g),
        "exponents": _all_exponents(g),
        "poked": normal(31, 1056).masked_fill(torch.rand(31, 1056, generator=g) < 0.01, float("nan")),
    }
    if dtype == torch.bfloat16:
        every = torch.arange(1 << 16).int().to(torch.int16).view(torch.bfloat16)
        cases["every bf16"] = every.view(64, 1024)
        cases["every bf16, shuffled"] = every[torch.randperm(1 << 16, generator=g)].view(64, 1024)
    return {name: case.to(dtype) for name, case in cases.items()}


def every_code() -> tuple[torch.Tensor, torch.Tensor]:
    """MX data (256, 256) whose row i holds all e4m3 codes under scale byte i, and the scales (256, 8)."""
    data = torch.arange(256).to(torch.uint8).expand(256, 256).contiguous().view(torch.float8_e4m3fn)
    scale = torch.arange(256).to(torch.uint8)[:, None].expand(256, 8).contiguous().view(torch.float8_e8m0fnu)
    return data, scale


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Same shape, dtype and bytes; NaNs of a wider format count as one."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{what}: {got.shape} {got.dtype}, want {want.shape} {want.dtype}"
    assert got.is_contiguous(), f"{what}: not contiguous"
    got = got.detach().cpu()
    if got.element_size() > 1 and got.dtype.is_floating_point:
        assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN elsewhere"
        got, want = got.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), want.nan_to_num(0.0, torch.inf, -torch.inf)
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (got, want))
    if not torch.equal(a, b):
        at = (a != b).nonzero().flatten()
        raise AssertionError(f"{what}: {len(at)} of {len(a)} bytes differ, first at {at[0].item()}: {a[at[0]]:#x}, want {b[at[0]]:#x}")


def packed_views(qdata: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same MX rows as row-strided views into packed records, as an exchange returns them, with poison between the records."""
    rows, width = qdata.shape
    record = (width + width // 32 + 15) // 16 * 16 + 16
    records = torch.full((rows, record), 0xA5, dtype=torch.uint8, device=qdata.device)
    records[:, :width] = qdata.view(torch.uint8)
    records[:, width : width + width // 32] = scale.view(torch.uint8)
    return records[:, :width].view(qdata.dtype), records[:, width : width + width // 32].view(scale.dtype)


def row_map(num_padded: int, num_rows: int, padding: float = 0.2, seed: int = 0) -> torch.Tensor:
    """(num_padded,) int32: distinct rows in random order, each padded row -1 with the given probability (or for want of rows)."""
    g = torch.Generator().manual_seed(seed)
    taken = torch.randperm(max(num_rows, num_padded), generator=g)[:num_padded]
    hole = (taken >= num_rows) | (torch.rand(num_padded, generator=g) < padding)
    return torch.where(hole, -1, taken).int()

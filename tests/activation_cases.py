"""Every activation, and difficult inputs: ends of exp's range, NaN, Inf, zero blocks, views."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mxep.ops.activation.functions import ACTIVATIONS, SwiGLU

LAYOUTS = ("concatenated", "interleaved")
SWIGLUS = {
    "plain": SwiGLU(),
    "deepseek_v4": SwiGLU(10.0),
    "gpt_oss": SwiGLU(7.0, 1.702, 1.0),
    "tight": SwiGLU(0.5, -0.75, -0.25),  # most is clamped, and factors have other signs
    "unclamped": SwiGLU(alpha=1.702, offset=1.0),
}
# As operators take them.
FUNCTIONS: dict[str, dict[str, Any]] = {
    **{name: {"form": form} for name, form in SWIGLUS.items()},
    **{name: {"activation": name} for name in ACTIVATIONS if name != "swiglu"},
}


def hidden(gate: torch.Tensor, up: torch.Tensor | None, activation: str = "swiglu", form: SwiGLU = SWIGLUS["plain"]) -> torch.Tensor:
    """h by torch's own operations; not torch.clamp, whose gradient at its limits depends on torch's version."""
    if activation == "relu2":
        return F.relu(gate).square()
    assert up is not None
    if activation in ("geglu", "geglu_tanh"):
        return F.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none") * up
    if activation == "reglu":
        return F.relu(gate) * up
    assert activation == "swiglu", f"no truth for {activation}"
    how = form
    gate, up = torch.where(gate > how.limit, how.limit, gate), torch.where(up.abs() > how.limit, how.limit * up.sign(), up)
    return (F.silu(gate) if how.alpha == 1 else gate * torch.sigmoid(how.alpha * gate)) * (up + how.offset)


def gate_up(dtype: torch.dtype, rows: int, width: int, seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Named (dh (rows, width), x (rows, 2 width)) of `dtype` on the CPU; `cut` takes what a function without a gate reads."""
    g = torch.Generator().manual_seed(seed)

    def normal(columns: int, spread: float = 1.0) -> torch.Tensor:
        return spread * torch.randn(rows, columns, generator=g)

    def poked(value: torch.Tensor, with_what: float) -> torch.Tensor:
        return value.masked_fill(torch.rand(value.shape, generator=g) < 0.003, with_what)

    at_limits = (
        torch.randint(-2, 3, (rows, 2 * width), generator=g).float()
        * torch.tensor([10.0, 7.0, 0.5])[torch.randint(0, 3, (rows, 2 * width), generator=g)]
    )
    wide, zero = normal(2 * width, 40.0), normal(2 * width)
    zero[::3] = 0
    zero[:, 32:64] = 0
    cases = {
        "normal": (normal(width), normal(2 * width)),
        "wide": (normal(width), wide),  # both sides of exp's overflow at 88
        "small": (normal(width, 1e-6), normal(2 * width, 1e-4)),
        "zero": (poked(normal(width), 0.0), zero),
        "at limits": (normal(width), at_limits),
        "wild": (poked(normal(width), torch.nan), poked(poked(normal(2 * width, 3.0), torch.inf), -torch.inf)),
    }
    return {name: (dh.to(dtype), x.to(dtype)) for name, (dh, x) in cases.items()}


def far_apart(dtype: torch.dtype, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(dh (rows, width), x (rows, 2 width)) whose blocks lie up to 2^28 apart, in some rows 2^148, with zeros, tiny values, NaN and Inf."""
    g = torch.Generator().manual_seed(0)

    def drawn(columns: int, most: int = 14) -> torch.Tensor:
        scales = torch.exp2(torch.randint(-most, most + 1, (rows, columns // 32), generator=g).float())
        return torch.randn(rows, columns, generator=g) * scales.repeat_interleave(32, 1)

    dh, x = drawn(width), drawn(2 * width)
    x[1::7] *= drawn(2 * width, 60)[1::7]
    x[::5] *= 2.0**-100
    x[::4, :32] = 0
    x[3::8] = 0
    x[2::11, 2 * width - 1], x[5::11, width] = torch.nan, torch.inf
    return dh.to(dtype), x.to(dtype)


def whole_range(largest: float = torch.finfo(torch.float32).max) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dh, gate, up), each (T, 32) float32: gates over float32's finite range with moderate ups, and the other way round."""
    least = torch.finfo(torch.float32).smallest_normal
    wide = 2.0 ** torch.arange(-149.0, 128.0, 0.5, dtype=torch.float64)
    ends = torch.tensor([0.0, least, 2.0**-149, largest, 12.0, 64.0, 88.0, 1.2e13, 1.5e13, 1.8e19, 2e38], dtype=torch.float64)
    near = torch.cat([torch.tensor([value, value]).nextafter(torch.tensor([0.0, torch.inf])) for value in (12.0, 64.0, 88.0, 104.0)])
    values = torch.cat((wide, ends, near.double())).clamp(max=largest).float()
    values = torch.cat((values, -values))
    moderate = torch.tensor([-7.5, -1.0, -0.25, 0.0, 0.7, 1.5, 6.0])
    gate = torch.cat((values.repeat_interleave(len(moderate)), moderate.repeat(len(values))))
    up = torch.cat((moderate.repeat(len(values)), values.repeat_interleave(len(moderate))))
    dh = torch.where(torch.arange(len(gate)) % 2 == 0, 0.75, -0.5)
    return tuple(part[: len(gate) // 32 * 32].view(-1, 32) for part in (dh, gate, up))  # type: ignore[return-value]


def assert_right_everywhere(
    got: tuple[torch.Tensor, ...], function: str, near: float = 1e-6, largest: float = torch.finfo(torch.float32).max
) -> None:
    """h, the gradients of gate and (where there is one) of up of `whole_range(largest)` against float64 and autograd."""
    how = FUNCTIONS[function]
    form = how.get("form", SWIGLUS["plain"])
    dh, gate, up = (part.double() for part in whole_range(largest))
    leaves = [leaf.requires_grad_() for leaf in ((gate,) if function == "relu2" else (gate, up))]
    h = hidden(leaves[0], None if function == "relu2" else up, **how)
    want = (h.detach(), *torch.autograd.grad(h, leaves, dh))
    steep = 1.0 + (form.alpha * gate).abs() if function != "geglu_tanh" else 1.0 + gate.abs() * (1.6 + 0.215 * gate.square())
    steep = torch.where(steep < 4096, steep, 1.0).detach()  # beyond, s is 0 or 1 and no error of the exponent shows
    if function == "relu2":
        sizes: tuple[torch.Tensor, ...] = gate.square(), (dh * gate).abs()
    else:
        reach = up.abs().clamp(max=form.limit) + abs(form.offset)
        sizes = (gate * reach).abs() * steep, (dh * reach).abs() * steep, (dh * gate).abs() * steep
    for name, a, b, size in zip(("h", "d_gate", "d_up"), got, want, sizes, strict=False):
        rounded = b.float()
        off = torch.where(a == rounded, 0.0, (a.double() - b).abs())  # NaN is nowhere equal
        wrong = ~(off <= near * size + 2.0**-126)
        assert not wrong.any(), f"{function} {name}: {a[wrong][:4]}, want {b[wrong][:4]}, gate {gate[wrong][:4]}, up {up[wrong][:4]}"


def cut(dh: torch.Tensor, x: torch.Tensor, function: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """dh (T, H) with the x (T, 2H), or its first half, that such a function reads."""
    return dh, x[:, : dh.shape[1]] if function.get("activation") == "relu2" else x


def strided_views(wide: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Named (dh (T, 96), x (T, 192)) with other strides than a matrix of their own, from wide (T, at least 1025)."""
    return {
        "row-strided, unaligned": (wide[:, 1:97], wide[:, 101:293]),
        "every second row": (wide[::2, :96], wide[::2, 96:288]),
        "column-strided": (wide[:, ::4][:, :96], wide[:, ::5][:, :192]),
        "expanded row": (wide[:1, :96].expand(33, 96), wide[:1, :192].expand(33, 192)),
        "expanded scalar": (wide[:1, :1].expand(33, 96), wide[:33, :192]),
        "transposed": (wide[:, :96].t().contiguous().t(), wide[:, :192].t().contiguous().t()),
    }

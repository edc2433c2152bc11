"""The AdamW kernel on a GPU against its reference: quantised moments and their scales by bytes, the parameter to a bit of float32."""

from __future__ import annotations

import pytest
import torch

from mxep import reference
from mxep.ops import kernels
from mxep.ops.optimizer.codes import BLOCKS

pytestmark = pytest.mark.gpu
BF16, FLOAT32 = torch.bfloat16, torch.float32
HYPERPARAMETERS = (0.9, 0.95, 0.1, 1e-8)
WHOLE, CUT, ODD = (4224, 4224, 0), (384, 1152, 768), (33, 99, 13)  # runs of 4224 values


def tensors(bits: int, dtype: torch.dtype, n: int, device: str) -> list[torch.Tensor | None]:
    """Parameter, moments, scales and step."""
    generator = torch.Generator().manual_seed(0)
    parameter = (torch.randn(n, generator=generator) * 0.1).to(device, dtype)
    if not bits:
        return [parameter, torch.zeros_like(parameter), torch.zeros_like(parameter), None, None, torch.zeros((), device=device)]
    codes = [torch.zeros(n * bits // 8, dtype=torch.uint8, device=device) for _ in range(2)]
    return [parameter, *codes, *(torch.zeros(n // BLOCKS[bits], device=device) for _ in range(2)), torch.zeros((), device=device)]


@pytest.mark.parametrize("runs", [WHOLE, CUT, ODD], ids=["whole", "cut", "odd"])
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
@pytest.mark.parametrize("bits", [8, 4, 0])
def test_steps_are_the_references(bits: int, dtype: torch.dtype, runs: tuple[int, int, int]) -> None:
    n = 4096 if bits == 8 else 4224
    if runs == WHOLE:
        runs = (n, n, 0)
    stepped = []
    for device, step in (("cpu", reference.adamw_step), ("cuda", kernels.adamw_step)):
        parameter, *moments, steps = tensors(bits, dtype, n, device)
        generator = torch.Generator().manual_seed(1)
        for skipped in (0.0, 0.0, 1.0, 0.0):
            gradient = torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp()
            scalars = [torch.full((), value, device=device) for value in (1e-2, 3.0, skipped)]
            gradient = gradient.to(device, BF16 if runs == CUT else dtype)
            step(parameter, gradient, *moments, steps, *scalars, 123456789, runs, HYPERPARAMETERS)
        stepped.append([None if value is None else value.cpu() for value in (parameter, *moments, steps)])
    (want, *want_state), (found, *state) = stepped
    for name, theirs, ours in zip(("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "step"), want_state, state, strict=True):
        if not bits and dtype == FLOAT32:  # on a CPU torch's fused step, which rounds elsewhere
            assert theirs is None or torch.allclose(ours, theirs, rtol=2**-20, atol=1e-9), name
        else:
            assert theirs is None or torch.equal(ours, theirs), name
    torch.testing.assert_close(found, want, rtol=2**-7 if dtype == BF16 else 2**-20, atol=1e-7)
    assert dtype == FLOAT32 or (found != want).float().mean() < 0.001, "other random bits"


@pytest.mark.parametrize("n", [4224, 2**21 + 128])
@pytest.mark.parametrize("bits", [8, 4, 0])
def test_squares_of_the_gradient(bits: int, n: int) -> None:
    """Before the division, added to what is there, in the same order in every run; none of a skipped step."""
    n = n // 256 * 256 if bits == 8 else n
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(1)).to("cuda", BF16)
    found = []
    for skipped in (0.0, 0.0, 1.0):
        parameter, *moments, steps = tensors(bits, BF16, n, "cuda")
        scalars = [torch.full((), value, device="cuda") for value in (1e-2, 3.0, skipped)]
        squares = torch.full((), 7.0, device="cuda", dtype=torch.float64)
        kernels.adamw_step(parameter, gradient, *moments, steps, *scalars, 5, (n, n, 0), HYPERPARAMETERS, squares)
        found.append(float(squares))
    assert found[0] == pytest.approx(7 + float(gradient.double().square().sum()), rel=1e-6)
    assert found[1:] == [found[0], 7.0]


@pytest.mark.parametrize("bits", [8, 0])
def test_unaligned_memory(bits: int) -> None:
    """Gradients are views of a larger buffer, as FSDP's are."""
    ends = []
    for offset in (0, 1):
        parameter, *moments, steps = tensors(bits, BF16, 4096, "cuda")
        gradient = torch.randn(4097, generator=torch.Generator().manual_seed(1)).to("cuda", BF16)
        gradient = gradient[1:] if offset else gradient[1:].clone()
        lr = torch.full((), 1e-2, device="cuda")
        kernels.adamw_step(parameter, gradient, *moments, steps, lr, None, None, 5, (4096, 4096, 0), HYPERPARAMETERS)
        ends.append([parameter, *(moment for moment in moments if moment is not None)])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.parametrize("grad_scale", [None, 3.0])
@pytest.mark.parametrize("bits", [8, 4, 0])
def test_values_that_are_not_finite_are_those_of_the_reference(bits: int, grad_scale: float | None) -> None:
    """NaN, infinities, and a gradient whose square is one: in the codes and scales of their blocks, and one step later."""
    stepped = []
    for device, step in (("cpu", reference.adamw_step), ("cuda", kernels.adamw_step)):
        parameter, *moments, steps = tensors(bits, BF16, 2048, device)
        generator = torch.Generator().manual_seed(1)
        for taken in range(2):
            gradient = torch.randn(2048, generator=generator)
            if not taken:
                gradient[300], gradient[600], gradient[601], gradient[1100] = torch.nan, torch.inf, -torch.inf, 1e30
            lr, scale = (None if value is None else torch.full((), value, device=device) for value in (1e-2, grad_scale))
            step(parameter, gradient.to(device, BF16), *moments, steps, lr, scale, None, 5, (2048, 2048, 0), HYPERPARAMETERS)
            stepped.append([None if value is None else value.cpu().clone() for value in (*moments, parameter)])
    for want, found in zip(stepped[:2], stepped[2:], strict=True):
        for theirs, ours in zip(want[:-1], found[:-1], strict=True):
            assert theirs is None or torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
        assert torch.equal(found[-1].isfinite(), want[-1].isfinite())
        assert not want[-1].isfinite().all()


def test_codes_at_an_odd_address_are_refused() -> None:
    parameter, _, *rest = tensors(8, BF16, 256, "cuda")
    lr = torch.full((), 1e-2, device="cuda")
    odd = torch.zeros(257, dtype=torch.uint8, device="cuda")[1:]
    with pytest.raises(ValueError, match="codes at an address that is no multiple of 8"):
        kernels.adamw_step(parameter, parameter.clone(), odd, *rest, lr, None, None, 5, (256, 256, 0), HYPERPARAMETERS)


def test_past_two_billion_values() -> None:
    """The last values of a parameter are those of a small one at the same positions."""
    n, tail = 2**31 + 8192, 4096
    if torch.cuda.mem_get_info()[0] < 7 * n:
        pytest.skip(f"needs {7 * n / 2**30:.0f} GiB of GPU memory")
    whole = [torch.zeros(n, device="cuda", dtype=BF16), *(torch.zeros(n, device="cuda", dtype=torch.uint8) for _ in range(2))]
    whole += [torch.zeros(n // 256, device="cuda") for _ in range(2)]
    gradient = torch.zeros(n, device="cuda", dtype=BF16)
    gradient[-tail:] = torch.randn(tail, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    part = [value[-tail if value.numel() == n else -tail // 256 :].clone() for value in whole]
    lr = torch.full((), 1e-2, device="cuda")
    for values, grad, runs in ((whole, gradient, (n, n, 0)), (part, gradient[-tail:].clone(), (tail, tail, n - tail))):
        kernels.adamw_step(values[0], grad, *values[1:], torch.zeros((), device="cuda"), lr, None, None, 5, runs, HYPERPARAMETERS)
    for large, small in zip(whole, part, strict=True):
        assert torch.equal(large[-small.numel() :], small)

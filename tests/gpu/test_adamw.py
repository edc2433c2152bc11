"""Low-memory steps on a GPU: the kernel's step against the CPU's, updates during backward, and a resume to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.steps import done, same, state_of
from torch import nn

from mxep.train.adamw import AdamW
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.state_precision import StatePrecision
from mxep.train.trainer import Trainer

pytestmark = pytest.mark.gpu
KINDS = [StatePrecision("adamw8bit", "bfloat16"), StatePrecision("adamw4bit"), StatePrecision("adamw", "bfloat16"), StatePrecision()]


@pytest.mark.parametrize("precision", KINDS, ids=str)
def test_steps_are_those_of_the_cpu(precision: StatePrecision) -> None:
    """The same random bits; arithmetic may differ in the last bit of float32. Without a host sync, once the kernels are compiled."""
    parameters = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        made = {
            name: nn.Parameter(torch.randn(shape).to(device, precision.torch_dtype)) for name, shape in (("a", (512, 256)), ("b", (64,)))
        }
        optimizer = AdamW([{"params": list(made.items()), "weight_decay": 0.1}], 1e-2, (0.9, 0.95), state_bits=precision.state_bits)
        optimizer.grad_scale, optimizer.found_inf = (torch.full((), value, device=device) for value in (2.0, 0.0))
        for step in range(3):
            for parameter in made.values():
                parameter.grad = torch.randn(parameter.shape).to(device, precision.torch_dtype)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        parameters[device] = {name: parameter.detach().cpu().float() for name, parameter in made.items()}
    for name, want in parameters["cpu"].items():
        found = parameters["cuda"][name]
        torch.testing.assert_close(found, want, rtol=2**-7, atol=1e-3)
        if precision.dtype == "bfloat16":
            assert (found != want).float().mean() < 0.02, "other random bits"


def test_small_float32_parameters_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large parameter, which takes the kernel: torch's numbers, the bits of separate steps, unchanged gradients, no host sync."""
    fused, counts, ends = torch._fused_adamw_, [], []

    def counted(parameters: list[torch.Tensor], *rest: Any, **options: Any) -> None:
        counts.append(len(parameters))
        fused(parameters, *rest, **options)

    for arm in ("torch", "together", "one by one"):
        torch.manual_seed(0)
        made = [nn.Parameter(torch.randn(size, 64, device="cuda")) for size in (*range(1, 150), 1 << 15)]
        groups = [{"params": [(f"{n}", parameter) for n, parameter in enumerate(made)], "weight_decay": 0.1}]
        ours = AdamW(groups, 1e-2, (0.9, 0.95))
        theirs = torch.optim.AdamW(made, 1e-2, (0.9, 0.95), 1e-8, 0.1, fused=True)
        for step in range(4):
            ours.grad_scale = theirs.grad_scale = torch.full((), 3.0, device="cuda")  # type: ignore[attr-defined]
            ours.found_inf = theirs.found_inf = torch.full((), float(step == 1), device="cuda")  # type: ignore[attr-defined]
            grads = [torch.randn_like(parameter) for parameter in made]
            for parameter, grad in zip(made, grads, strict=True):
                parameter.grad = grad.clone()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step == 3 and arm != "torch" else "default")
            try:
                if arm == "torch":
                    theirs.step()
                elif arm == "together":
                    with monkeypatch.context() as patch:
                        patch.setattr(torch, "_fused_adamw_", counted)
                        ours.step()
                else:
                    for parameter in made:
                        ours.step_parameter(parameter, ours.param_groups[0])
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert arm == "torch" or all(torch.equal(parameter.grad, grad) for parameter, grad in zip(made, grads, strict=True))
        ends.append([parameter.detach() for parameter in made])
    assert counts == [149] * 4
    assert all(map(torch.equal, *ends[1:]))
    for found, want in zip(ends[1], ends[0], strict=True):
        torch.testing.assert_close(found, want, rtol=2**-20, atol=1e-6)


@pytest.mark.parametrize("precision", [StatePrecision(), *KINDS[:1]], ids=str)
def test_steps_during_backward_are_those_after_it(tmp_path: Path, nccl: torch.device, precision: StatePrecision) -> None:
    """To the bit; a run that stops and resumes has the same bits too."""
    text = tmp_path / "text.py"
    text.write_text(Path(json.__file__).read_text())
    options: dict[str, Any] = {"device": "cuda", "batch": 2, "seq_len": 256, "data": (str(text),), "steps": 4, "max_grad_norm": 0.0}
    options |= {"evaluate": False, "force_balance": True, "checkpoint_every": 100, **vars(precision)}
    ends = []
    for name, more in (("after", {}), ("during", {"optimizer_in_backward": True})):
        run = Trainer(TrainConfig(**options, **more), Ranks(0, 1, nccl), tmp_path / name)
        for _ in range(4):
            done(run)
        ends.append(state_of(run))
    assert len(same(*ends)) == len(ends[0])
    for more in ({"stop_after": 2}, {"resume": True}):
        run = Trainer(TrainConfig(**options, **more), Ranks(0, 1, nccl), tmp_path / "stopped")
        run.train()
    assert len(same(ends[0], state_of(run))) == len(ends[0])

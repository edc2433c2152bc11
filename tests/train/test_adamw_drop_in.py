"""AdamW in the place of torch's: groups, names, schedules, states and loads as torch.optim.AdamW has them, and what is refused."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from tests.adamw_cases import KINDS, gradients_of, optimizer_of, parameters_of, stepped
from torch import nn

from mxep.train.adamw import AdamW
from mxep.train.optimizer import build_optimizer
from mxep.train.optimizer_in_backward import OptimizerInBackward
from mxep.train.state_precision import StatePrecision


def test_as_torchs() -> None:
    """Groups with numbers of their own, one added later, rates that change, a closure: torch's numbers in float32."""
    ends = []
    for kind in (AdamW, torch.optim.AdamW):
        parameters = list(parameters_of(torch.float32).values())
        groups: list[dict[str, Any]] = [
            {"params": parameters[:1], "lr": 3e-3, "betas": (0.8, 0.9)},
            {"params": parameters[1:2], "weight_decay": 0},
        ]
        optimizer: Any = kind(groups, lr=1e-2, eps=1e-6)

        def closure(parameters: list[nn.Parameter] = parameters, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((parameter**2).sum() for parameter in parameters)
            loss.backward()
            return loss

        losses = []
        for step in range(4):
            losses.append(optimizer.step(closure).item())
            for group in optimizer.param_groups:
                group["lr"] /= 2
            if step == 1:
                optimizer.add_param_group({"params": parameters[2:]})
        assert losses == sorted(losses, reverse=True)
        ends.append((parameters, losses))
    assert ends[0][1] == ends[1][1]
    for mine, other in zip(ends[0][0], ends[1][0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_names_choose_the_random_bits() -> None:
    ends = {}
    for name, params in (
        ("names", lambda p: p.items()),
        ("numbers", lambda p: p.values()),
        ("the same", lambda p: zip("0123", p.values(), strict=True)),
    ):
        parameters = parameters_of(torch.bfloat16)
        stepped(parameters, AdamW(list(params(parameters)), 1e-2), range(2))
        ends[name] = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
    assert torch.equal(ends["numbers"], ends["the same"])
    assert not torch.equal(ends["numbers"], ends["names"])


def test_torchs_state_is_loaded() -> None:
    """Of some parameters: others were not stepped."""
    ours, theirs = parameters_of(torch.float32), parameters_of(torch.float32)
    reference = torch.optim.AdamW(theirs.values(), 1e-2, weight_decay=0.1)
    optimizer = AdamW(ours.values(), 1.0)
    for name, grad in gradients_of(0, torch.float32).items():
        theirs[name].grad = None if name == "norm" else grad
    reference.step()
    with torch.no_grad():
        for mine, other in zip(ours.values(), theirs.values(), strict=True):
            mine.copy_(other)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for step in (1, 2):
        for name, grad in gradients_of(step, torch.float32).items():
            ours[name].grad, theirs[name].grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_a_parameter_in_the_place_of_another() -> None:
    """As Accelerate does: it loads the optimizer's own state, and replaces parameters once FSDP2 has sharded them."""
    old, new, other = (nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16)) for _ in range(3))
    optimizer = AdamW([("weight", old), ("other", other)], 1e-2, state_bits=8)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state, "of parameters that may be replaced"
    other.grad = torch.ones_like(other)
    optimizer.step()
    optimizer.make_states()
    optimizer.param_groups[0]["params"][0] = new
    new.grad = torch.ones_like(new)
    optimizer.step()
    assert (new < 1).all()
    assert set(optimizer.state) == {new, other}
    assert len(optimizer.state_dict()["state"]) == 2
    foreign = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="AdamW: a parameter of no group; add one by add_param_group"):
        optimizer.step_parameter(foreign, optimizer.param_groups[0])


def test_states_that_were_cleared_are_made_again() -> None:
    ends = []
    for clears in (False, True):
        parameters = parameters_of(torch.float32)
        optimizer = optimizer_of(parameters, KINDS[0])
        if clears:
            stepped(parameters_of(torch.float32), optimizer, range(1))  # of others
            optimizer.make_states()
            optimizer.state.clear()
        stepped(parameters, optimizer, range(1))
        ends.append(parameters["matrix"])
    assert torch.equal(*ends)


def test_a_refused_load_changes_nothing() -> None:
    """Neither numbers nor moments: not of another precision, nor of what torch's class alone does."""
    parameters = parameters_of(torch.float32)
    optimizer = optimizer_of(parameters, KINDS[0])
    stepped(parameters, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    for options, message in (
        ({}, "AdamW: the state of matrix is"),
        ({"maximize": True}, "a group with maximize=True, which this class does not do"),
    ):
        theirs = parameters_of(torch.float32)
        reference = torch.optim.AdamW(theirs.values(), 0.5, **options)
        for name, grad in gradients_of(1, torch.float32).items():
            theirs[name].grad = grad
        reference.step()
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(reference.state_dict())
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for number, state in before["state"].items():
            assert all(torch.equal(value, after["state"][number][key]) for key, value in state.items())


@pytest.mark.parametrize("lr", [torch.tensor(1e-2), torch.tensor([1e-2], dtype=torch.float64)], ids=["float32", "float64"])
def test_learning_rates_in_tensors(lr: torch.Tensor) -> None:
    ends = []
    for rate in (1e-2, lr):
        parameters = parameters_of(torch.bfloat16)
        stepped(parameters, AdamW(parameters.values(), rate), range(2))
        ends.append(parameters["matrix"])
    assert torch.equal(*ends)


def test_steps_in_backward_follow_the_groups_after_a_load() -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = AdamW([parameter], 1e-1)
    in_backward = OptimizerInBackward(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    parameter.sum().backward()
    assert (parameter == 1).all()
    assert in_backward.norm() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, r"AdamW: lr=-1.0, betas=.* want lr \(one number\), eps and weight_decay of at least 0 and betas from 0 to below 1"),
        ({"betas": (0.9, 1.0)}, "want lr"),
        ({"eps": float("nan")}, "want lr"),
        ({"weight_decay": -0.1}, "want lr"),
        ({"lr": torch.ones(2)}, "want lr"),
        ({"state_bits": 16}, "AdamW: state_bits=16, want 8, 4 or None"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.ones(4))], **change)


def test_a_refused_group_leaves_the_others() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter])
    with pytest.raises(ValueError, match=r"AdamW: parameter 0 of its group is torch.float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, dtype=torch.float16))]})
    with pytest.raises(ValueError, match=r"AdamW: a group with amsgrad=True, which this class does not do; take torch.optim.AdamW"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "amsgrad": True})
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert (parameter < 1).all()


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ValueError, match=r'--optimizer=adamw8bit, --dtype=bfloat16: AdamW: state_bits=8 needs torchao .*; pip install "\.\[torchao\]"'
    ):
        build_optimizer(nn.Linear(4, 4), 1e-3, 0.1, StatePrecision("adamw8bit", "bfloat16"))
    with pytest.raises(ValueError, match=r"AdamW: a step of bf16 on a CPU needs torchao 0.18 or later; pip install"):
        AdamW([nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]).make_states()
    AdamW([nn.Parameter(torch.ones(4, dtype=torch.bfloat16, device="meta"))])  # a GPU needs none
    linear = nn.Linear(4, 4)
    linear.weight.grad, before = torch.ones(4, 4), linear.weight.detach().clone()
    build_optimizer(linear, 1e-3, 0.1).step()
    assert not torch.equal(linear.weight, before), "float32 needs none"

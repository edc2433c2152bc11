"""start_beside without a second stream: on a CPU the work is done when its result is asked for, once, with its gradient."""

from __future__ import annotations

import torch

from mxep.moe.beside import start_beside


def test_on_a_cpu():
    asked: list[str] = []

    def work(x):
        asked.append("work")
        return x * 2

    x = torch.ones(3, requires_grad=True)
    result = start_beside(work, x)
    asked.append("exchange")
    result().sum().backward()
    assert asked == ["exchange", "work"]
    assert torch.equal(x.grad, torch.full((3,), 2.0))

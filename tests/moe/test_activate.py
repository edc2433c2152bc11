"""The activation between separate GEMMs, by torch's own operations, whose GELU overflows above 1e38."""

from __future__ import annotations

import pytest
import torch
from tests.activation_cases import FUNCTIONS, assert_right_everywhere, whole_range

from mxep.ops.activation.functions import SwiGLU, differentiable

LARGEST = 2.0**120


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_finite_gate_and_up_has_its_gradient(function: str) -> None:
    dh, gate, up = whole_range(LARGEST)
    how = FUNCTIONS[function]
    leaves = [leaf.requires_grad_() for leaf in ((gate,) if function == "relu2" else (gate, up))]
    h = differentiable(leaves[0], None if function == "relu2" else up, how.get("activation", "swiglu"), how.get("form", SwiGLU()))
    assert_right_everywhere((h.detach(), *torch.autograd.grad(h, leaves, dh)), function, largest=LARGEST)

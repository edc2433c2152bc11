"""Forwards that are replaced: undone, pickled and copied with their modules, and told from other forwards."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from typing import Any

import torch
from torch import Tensor, nn

from mxep.parallel.forwards import is_forward_wrapped, replace_forward, replaced_by


def times(module: nn.Linear, factor: float, x: Tensor) -> Tensor:
    return factor * type(module).forward(module, x)


def test_replaced_and_undone() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    want = layer(x)
    assert replaced_by(layer) is None
    undo = replace_forward(layer, times, 2.0)
    assert torch.equal(layer(x), 2 * want)
    assert replaced_by(layer) is times
    undo()
    assert not {"forward", "_mxep_replacement"} & vars(layer).keys()


def test_pickles_and_copies_compute_by_their_own_weights() -> None:
    layers, x = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), torch.randn(4, 3)
    for layer, factor in zip(layers, (2.0, 4.0), strict=True):
        replace_forward(layer, times, factor)
    want = [layer(x) for layer in layers]
    alone = pickle.loads(pickle.dumps(layers[0].forward))
    for made in (pickle.loads(pickle.dumps(layers)), copy.deepcopy(layers), [alone.__self__]):
        for layer, wanted in zip(made, want, strict=False):
            assert replaced_by(layer) is times
            assert layer.forward.__self__ is layer
            with torch.no_grad():
                layer.weight.mul_(2)
                layer.bias.mul_(2)
            assert torch.equal(layer(x), 2 * wanted)
    assert [torch.equal(layer(x), wanted) for layer, wanted in zip(layers, want, strict=True)] == [True, True]


def test_over_another_forward() -> None:
    """A pickle reads a module's attributes in their order."""
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    layer.forward = functools.partial(times, layer, 5.0)  # type: ignore[method-assign]
    for factor in (3.0, 2.0):
        replace_forward(layer, times, factor)
    want = nn.Linear.forward(layer, x) * 2
    assert torch.equal(layer(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), want)


def test_a_forward_around_it_is_told() -> None:
    layer = nn.Linear(3, 2)
    replace_forward(layer, times, 2.0)
    assert not is_forward_wrapped(layer)
    inner = layer.forward

    @functools.wraps(inner)
    def around(module: nn.Module, *args: Any) -> Any:
        return inner(*args)

    layer.forward = types.MethodType(around, layer)  # type: ignore[method-assign]
    assert is_forward_wrapped(layer)

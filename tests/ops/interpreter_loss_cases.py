"""The cross-entropy kernel under Triton's interpreter, run by test_kernel_interpreter.py like interpreter_cases.py."""

from __future__ import annotations

import pytest
import torch
from tests.loss_cases import assert_close_to_exact, labelled_rows
from tests.ops import interpreter_repairs

from mxep import reference
from mxep.ops import kernels
from mxep.ops.cross_entropy.reference import IGNORE
from mxep.ops.runtime import tiles

interpreter_repairs.apply()
pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of columns a row, also in small cases."""
    monkeypatch.setattr(tiles, "LOSS_COLUMNS", 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "words"), [(7, 100), (3, 96), (2, 1), (4, 31), (5, 33), (0, 8)])
def test_cross_entropy(rows: int, words: int, dtype: torch.dtype):
    logits, labels = labelled_rows(rows, words, dtype)
    before = logits.clone()
    losses = kernels.cross_entropy(logits, labels)
    assert torch.equal(logits, before)
    torch.testing.assert_close(losses, reference.cross_entropy(logits, labels), rtol=2e-6, atol=2e-6)
    again = kernels.cross_entropy_to_gradient(logits, labels)
    assert torch.equal(again, losses)
    assert_close_to_exact(losses, logits, before, labels)


def test_only_its_rows_are_written():
    """Between rows of NaN, labels strided."""
    logits, labels = labelled_rows(6, 45, torch.bfloat16)
    memory = torch.full((10, 45), torch.nan, dtype=torch.bfloat16)
    memory[2:8] = logits
    losses = kernels.cross_entropy_to_gradient(memory[2:8], torch.stack((labels, labels), 1)[:, 0])
    assert_close_to_exact(losses, memory[2:8], logits, labels)
    assert memory[:2].isnan().all()
    assert memory[8:].isnan().all()


def test_large_values_and_infinities():
    rows = torch.full((6, 70), -torch.inf)
    rows[0, 3] = 1e30  # alone
    rows[1, :] = -3e38  # equal, near the lowest float32
    rows[2, 40:] = 5.0  # nothing in the first block
    rows[3, 5] = torch.inf
    rows[4, 69] = torch.nan
    labels = torch.tensor([3, 0, 0, 5, 1, 2])
    want_rows, got_rows = rows.clone(), rows.clone()
    want, got = reference.cross_entropy_to_gradient(want_rows, labels), kernels.cross_entropy_to_gradient(got_rows, labels)
    torch.testing.assert_close(got, want, equal_nan=True)
    torch.testing.assert_close(got_rows, want_rows, equal_nan=True)


@pytest.mark.parametrize("label", [70, -1, 2**40, -(2**40)])
def test_a_label_out_of_range_is_seen(label: int):
    """The kernel's row is NaN and no other; the reference says which."""
    logits, labels = labelled_rows(3, 70, torch.float32)
    labels[1] = label
    with pytest.raises(ValueError, match=f"cross_entropy: label {label}, want 0 to 69 or {IGNORE}"):
        reference.cross_entropy(logits, labels)
    losses, before = kernels.cross_entropy(logits, labels), logits.clone()
    assert losses.isnan().tolist() == [False, True, False]
    kernels.cross_entropy_to_gradient(logits, labels)
    assert logits[1].isnan().all()
    labels[1] = 0
    assert_close_to_exact(losses[::2], logits[::2], before[::2], labels[::2])


def test_float64_is_left_to_the_reference():
    logits, labels = labelled_rows(4, 9, torch.float64)
    other = logits.clone()
    assert torch.equal(kernels.cross_entropy(logits, labels), reference.cross_entropy(logits, labels))
    assert torch.equal(kernels.cross_entropy_to_gradient(logits, labels), reference.cross_entropy_to_gradient(other, labels))
    assert torch.equal(logits, other)


@pytest.mark.parametrize("implementation", [kernels, reference])
@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_to_gradient"])
def test_refused(name: str, implementation: object):
    logits, labels = labelled_rows(4, 6, torch.float32)
    for bad in ((logits.half(), labels), (logits.t(), labels), (logits, labels[:3]), (logits, labels.int()), (logits[0], labels)):
        with pytest.raises(ValueError, match=f"{name}: logits .* want contiguous"):
            getattr(implementation, name)(*bad)

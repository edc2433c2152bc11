"""tests/programs/loss_by_part.py on a CPU: it runs, and its columns are losses of the precisions that they name."""

from __future__ import annotations

import pytest
import torch
from tests.programs import loss_by_part

SMALL = ["--device", "cpu", "--thin", "--layers", "2", "--steps", "4", "--batch", "1", "--seq-len", "64"]


def columns(printed: str) -> list[list[float]]:
    title, *rows = printed.splitlines()
    assert title.endswith("minus that: experts, linears, output, experts+linears+output")
    return [[float(word) for word in row.split()] for row in rows if "loss" not in row]


def losses(printed: str) -> list[float]:
    """Of every step's training batches."""
    return [float(row.split()[2]) for row in printed.splitlines()[1:] if "loss" in row]


def test_losses_of_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    loss_by_part.main([*SMALL, "--train", "experts+linears+output"])
    in_mx = columns(capsys.readouterr().out)
    loss_by_part.main([*SMALL, "--train", "hp"])
    in_hp = columns(capsys.readouterr().out)
    assert [row[0] for row in in_hp] == [row[0] for row in in_mx] == [1, 4]
    assert in_hp[0] == in_mx[0], "before the first step the weights are the same"
    assert in_hp[1] != in_mx[1]
    for _, loss, *differences in [*in_hp, *in_mx]:
        assert 5 < loss < 10
        assert all(abs(difference) < 0.2 for difference in differences)
        assert any(differences)


def test_steps_of_several_batches(capsys: pytest.CaptureFixture[str]) -> None:
    loss_by_part.main([*SMALL, "--batch", "2", "--compare-every", "0"])
    whole = capsys.readouterr().out
    loss_by_part.main([*SMALL, "--accumulate", "2", "--compare-every", "0"])
    halves = capsys.readouterr().out
    assert columns(whole) == columns(halves) == []
    assert losses(halves) == pytest.approx(losses(whole), abs=2e-3)
    loss_by_part.main([*SMALL, "--experts", "16", "--steps", "1"])
    assert losses(capsys.readouterr().out) != losses(whole)[:1]


def test_noise_disturbs_the_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    loss_by_part.main([*SMALL, "--steps", "1", "--noise", "0.0377"])
    noisy = capsys.readouterr().out
    loss_by_part.main([*SMALL, "--steps", "1"])
    exact = capsys.readouterr().out
    assert columns(noisy) == columns(exact)
    assert losses(noisy) != losses(exact)
    assert losses(noisy) == pytest.approx(losses(exact), abs=0.05)

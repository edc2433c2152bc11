"""Parameters stepped during backward: the numbers of a step after it, one unit's gradients at a time, skips, errors, resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.operator_calls import OperatorCalls
from tests.ranks import run_ranks
from tests.steps import done, same, state_of, steps_of, trainer
from tests.truth import raises_naming
from torch.nn.parallel import DistributedDataParallel

from mxep.models.loss import IGNORE
from mxep.parallel import apply_ddp, build_meshes
from mxep.train import AdamW, OptimizerInBackward
from mxep.train.config import TrainConfig
from mxep.train.data.loader import Batch
from mxep.train.optimizer import GradientNorms
from mxep.train.resolved_config import resolve
from mxep.train.run_folder import list_checkpoints
from mxep.train.trainer import Trainer

IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
LOW_MEMORY: dict[str, Any] = {"optimizer": "adamw8bit", "dtype": "bfloat16"}


def count_live(run: Trainer) -> list[int]:
    """How many parameters have a gradient at each update of one; the list fills while the run steps."""
    live: list[int] = []
    step = run.optimizer.step_parameter

    def counted(*arguments: Any) -> None:
        live.append(sum(parameter.grad is not None for parameter in run.model.parameters()))
        step(*arguments)

    run.optimizer.step_parameter = counted  # type: ignore[method-assign]
    return live


def steps_alike(rank: int, world: int, out: str, data: str, options: dict[str, Any]) -> None:
    ends, figures = [], []
    for name, more in (("after", {"max_grad_norm": 0.0}), ("during", IN_BACKWARD)):
        run = trainer(rank, world, f"{out}/{name}", data=(data,), steps=3, checkpoint=False, cache_weights=True, **options, **more)
        live = count_live(run)
        records = [done(run) for _ in range(2)]
        figures.append([(record.loss, record.grad_norm, record.load_max_over_mean) for record in records])
        ends.append(state_of(run))
        assert all(parameter.grad is None for parameter in run.model.parameters())
    count = len(list(run.model.parameters()))
    assert len(live) == 2 * count
    assert max(live) <= len(list(run.model.layers["1"].parameters())), "more than one layer's"
    assert len(same(*ends)) == len(ends[0])
    assert figures[0] == [pytest.approx(figure, rel=4e-6) for figure in figures[1]]  # the norm: float32 sums in another order


@pytest.mark.parametrize(("world", "options"), [(1, {}), (1, LOW_MEMORY), (2, {**LOW_MEMORY, "ep": 2}), (2, {"ep": 1})], ids=str)
def test_steps_are_those_after_backward(tmp_path: Path, text: str, world: int, options: dict[str, Any]) -> None:
    """To the bit, with one unit's gradients at a time."""
    run_ranks(steps_alike, world, str(tmp_path), text, options)


def test_the_update_measures_its_gradient(tmp_path: Path, text: str, one_rank: None) -> None:
    """No operator but the update for a parameter with quantised moments: no norm, no copy of a gradient, no scalar of its own."""
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=2, evaluate=False, **IN_BACKWARD, **LOW_MEMORY)
    assert run.in_backward is not None
    done(run)
    run.in_backward.decide(torch.ones(()))
    run.in_backward.norm()
    parameters = list(run.model.parameters())
    with OperatorCalls() as seen:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
            seen.names.clear()
            run.in_backward._step(parameter)
            assert parameter.grad is None
            work = [name for name in seen.names if "view" not in name and "detach" not in name]
            assert work in (["mxep.adamw_step.default"], ["aten.zeros.default", "mxep.adamw_step.default"]), "the sum's zero once"
    found = float(run.in_backward.norm())
    assert found == pytest.approx(sum(parameter.numel() for parameter in parameters) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("how", ["torch", "mxep"])
@pytest.mark.parametrize("call", ["step", "norm"])
def test_ddp_which_sums_gradients_after_the_update_is_an_error(how: str, call: str, one_rank: None) -> None:
    model = torch.nn.Linear(64, 64)
    ddp = DistributedDataParallel(model) if how == "torch" else apply_ddp(model, build_meshes(1, 1, "cpu"))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    in_backward = OptimizerInBackward(optimizer)
    ddp(torch.ones(2, 64)).sum().backward()
    with raises_naming("OptimizerInBackward", "(64, 64)", "DistributedDataParallel", "apply_fsdp"):
        optimizer.step() if call == "step" else in_backward.norm()


def test_each_stream_has_a_sum_of_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared experts run on a second one: two streams that add to one number at the same time lose an addition."""
    norms, made = GradientNorms(), []
    grad: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    for stream, square in ((1, 9.0), (2, 16.0), (1, 11.0)):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _, stream=stream: stream, raising=False)
        made.append(norms.squares_of(grad).add_(square))
    assert made[0] is made[2]
    assert made[0] is not made[1]
    assert float(norms.joint()) == 6.0


def spoil_loss(run: Trainer, step: int) -> None:
    """Let the loss of that step be NaN."""
    loss = run.microbatches.loss

    def spoiled(batch: Batch) -> torch.Tensor:
        return loss(batch) * (torch.nan if run.step_count + 1 == step else 1.0)

    run.microbatches.loss = spoiled  # type: ignore[method-assign]


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, text: str, one_rank: None) -> None:
    """After a step that was skipped for its loss."""
    options = {"data": (text,), "steps": 5, "checkpoint_every": 100, "evaluate": False, **IN_BACKWARD, **LOW_MEMORY}
    ends = []
    for name, starts in (("straight", [{}]), ("stopped", [{"stop_after": 3}, {"resume": True}])):
        for more in starts:
            run = trainer(0, 1, str(tmp_path / name), **options, **more)
            spoil_loss(run, 2)
            run.train()
        ends.append(state_of(run))
        assert steps_of(tmp_path / name) == [1, 3, 4, 5]
    assert len(same(*ends)) == len(ends[0])


@pytest.mark.parametrize("options", [{}, LOW_MEMORY], ids=str)
def test_a_step_without_a_target_changes_nothing(tmp_path: Path, text: str, one_rank: None, options: dict[str, Any]) -> None:
    """Its loss, a sum over no targets, is 0, which is finite; its gradients are 0 / 0."""
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=4, evaluate=False, **IN_BACKWARD, **options)
    done(run)
    before, next_batch = state_of(run), run.sequences.next_batch

    def untargeted() -> Batch:
        batch = next_batch()
        return batch._replace(labels=torch.full_like(batch.labels, IGNORE))

    run.sequences.next_batch = untargeted  # type: ignore[method-assign]
    record = done(run)
    skipped = run.skipped.count(record.step, record.grad_norm, record.loss, record.valid_tokens)
    assert skipped is not None
    assert skipped.reason == "none of its tokens is a target"
    assert len(same(before, state_of(run))) == len(before)


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path, text: str, one_rank: None) -> None:
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=6, checkpoint_every=2, evaluate=False, **IN_BACKWARD)
    assert run.in_backward is not None
    norm = run.in_backward.norm
    run.in_backward.norm = lambda: norm() * (torch.nan if run.step_count == 3 else 1.0)  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match=r"step 4: gradient norm nan, loss .* so they are not saved: resume from the last"):
        run.train()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_00000002"]


@pytest.mark.parametrize(
    ("options", "name", "wanted"),
    [({"max_grad_norm": 1.0}, "max-grad-norm=1.0", 0), ({"accumulate": 2}, "accumulate=2", 1), ({"pp": 2, "batch": 2}, "pp=2", 1)],
)
def test_options_that_need_all_gradients_are_refused(options: dict[str, Any], name: str, wanted: int) -> None:
    with pytest.raises(ValueError, match=f"--optimizer-in-backward with --{name}, .* give --{name.partition('=')[0]} {wanted}, or leave"):
        resolve(TrainConfig(**{**IN_BACKWARD, **options}), "cpu", 2)

"""Steps whose results are read after the next one was launched: no line is lost, signals are handled in time."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.steps import done, records_of, steps_of, trainer

import mxep.train.trainer
from mxep.models.flops import flops_per_token
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.metrics import StepRecord, read_metrics
from mxep.train.step import PendingStep
from mxep.train.trainer import Trainer


def test_steps_with_documents_masked(tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other losses, fewer products of attention in the figures, the same of both where a document fills every sequence; a run keeps it."""
    monkeypatch.setattr(mxep.train.trainer, "peak_bf16_flops", lambda device: 1e12)
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": f"line {number} of many"}) + "\n" for number in range(200)))
    (tmp_path / "long.txt").write_text(Path(json.__file__).read_text())
    found = {}
    for name in ("short.jsonl", "long.txt"):
        for masked in (False, True):
            out = tmp_path / f"{name}-{masked}"
            run = trainer(0, 1, str(out), data=(str(tmp_path / name),), steps=2, mask_documents=masked, recipe="bf16")
            launched = [run.step() for _ in range(2)]
            records = [run.finish(step) for step in launched]
            total, counted = run.evaluate()
            assert counted
            found[name, masked] = [total, *(record.loss for record in records)]
            length = run.settings.seq_len
            assert all(step.attended == length for step in launched) == (not masked or name == "long.txt")
            if masked and name == "short.jsonl":
                assert all(10 < step.attended < 20 for step in launched)  # of 15 to 17 bytes, and one for the end, some cut
                flops = flops_per_token(run.shape, launched[0].attended, fused_layer=True)
                assert flops.model < flops_per_token(run.shape, length, fused_layer=True).model
                found_flops = (records[0].tflops, records[0].mfu, records[0].mfu_causal, records[0].hfu)
                expected = [64 * flops.model, *(64 * count for count in (flops.model, flops.model_causal, flops.hardware))]
                assert [1e12 * rate * records[0].step_s for rate in found_flops] == pytest.approx(expected)
                assert "mfu and hfu of 1 TFLOP/s a GPU: dense products in bf16, in recipes with MXFP8 as well" in run.describe()
    assert not any(masked == plain for masked, plain in zip(found["short.jsonl", True], found["short.jsonl", False], strict=True))
    assert found["long.txt", True] == pytest.approx(found["long.txt", False], rel=1e-5)
    saved = TrainConfig.from_json(json.loads(json.dumps(run.config.to_json())))
    assert saved.mask_documents
    del (values := run.config.to_json())["mask_documents"]
    assert not TrainConfig.from_json(values).mask_documents, "runs from before there was the option"


def test_the_line_of_a_step_is_printed_if_the_next_one_fails(tmp_path: Path, text: str, one_rank: None) -> None:
    """Also of one that was skipped. torch's error about memory gets a line that says what to do."""
    failing = {"evaluate": False, "checkpoint": False, "data": (text,), "steps": 6}
    for name, bad, told, skipped in (("fails", None, [1, 2, 3], []), ("both", 3, [1, 2], [3])):
        run = trainer(0, 1, str(tmp_path / name), **failing)
        norm, calls = mxep.train.trainer.gradient_norm, itertools.count(1)

        def counted(*arguments: object, norm=norm, calls=calls, bad=bad) -> torch.Tensor:  # type: ignore[no-untyped-def]
            call = next(calls)
            if call == 4:
                raise torch.OutOfMemoryError("no more")
            return norm(*arguments) * (math.nan if call == bad else 1.0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mxep.train.trainer, "gradient_norm", counted)
            with pytest.raises(torch.OutOfMemoryError, match="no more") as caught:
                run.train()
        (note,) = caught.value.__notes__
        assert "give --activation-checkpoint full, a smaller --batch with more --accumulate or more GPUs" in note
        assert steps_of(tmp_path / name) == told
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [record["step"] for record in records if record["kind"] == "skipped_step"] == skipped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_host_waits_ends_the_run_after_the_launched_step(
    tmp_path: Path, text: str, one_rank: None, number: signal.Signals
) -> None:
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=9, evaluate=False, checkpoint_every=100)
    finish = run.finish

    def finished(launched: PendingStep) -> StepRecord:
        if launched.step == 3:
            os.kill(os.getpid(), number)
        return finish(launched)

    run.finish = finished  # type: ignore[method-assign]
    assert not run.train()
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_a_signal_in_the_last_step_leaves_a_whole_run(tmp_path: Path, text: str, one_rank: None) -> None:
    """It is evaluated, too: there is no step left to resume."""
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=3, eval_every=100)
    step = run.step

    def stepped() -> PendingStep:
        if run.step_count == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    run.step = stepped  # type: ignore[method-assign]
    assert run.train()
    assert [record["step"] for record in records_of(tmp_path, "held_out")] == [3]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "bf16"])
def test_the_host_waits_for_no_step(tmp_path: Path, text: str, recipe: str) -> None:
    """So that it launches the next one while the GPU is at this one; figures are read when both are on their way. Layers of separate
    blocks wait for their splits."""
    device = torch.device("cuda", 0)
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        options = {"device": "cuda", "batch": 2, "seq_len": 256, "data": (text,), "evaluate": False, "recipe": recipe}
        config = TrainConfig(**options, fused_layer=True, steps=8)  # type: ignore[arg-type]
        run = Trainer(config, Ranks(0, 1, device), tmp_path)
        first = done(run).loss  # kernels are compiled
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = [run.step() for _ in range(2)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        records = [run.finish(step) for step in launched]
    finally:
        dist.destroy_process_group()
    assert [record.step for record in records] == [2, 3]
    assert all(0 < record.loss < first and record.step_s > 0 for record in records)

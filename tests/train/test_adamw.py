"""Quantised moments and stochastic rounding: torchao's numbers, skipped steps, clipping, random bits, and shards of whole blocks."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchao.optim
from tests.adamw_cases import KINDS, SHAPES, gradients_of, optimizer_of, parameters_of, stepped
from tests.ranks import run_ranks
from tests.spies import spy_on
from tests.steps import done, same, state_of, trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mxep.ops.optimizer import adamw_step as adamw_launcher
from mxep.ops.optimizer import reference as optimizer_reference
from mxep.train import adamw
from mxep.train.adamw import AdamW
from mxep.train.data.loader import Batch
from mxep.train.loaded_model import load_model
from mxep.train.state_precision import StatePrecision, moment_blocks
from mxep.train.trainer import Trainer

EIGHT_BIT = StatePrecision("adamw8bit", "bfloat16")
THEIRS = {"adamw8bit": torchao.optim.AdamW8bit, "adamw4bit": torchao.optim.AdamW4bit, "adamw": torchao.optim._AdamW}


@pytest.mark.parametrize("precision", KINDS, ids=str)
def test_numbers_are_torchaos(precision: StatePrecision, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, with rounding to nearest in both: torchao's random bits are another generator's."""
    monkeypatch.setattr(optimizer_reference, "round_stochastically", lambda values, bits: values.bfloat16())
    ours, theirs = (parameters_of(precision.torch_dtype) for _ in range(2))
    optimizer = optimizer_of(ours, precision)
    reference = THEIRS[precision.optimizer](theirs.values(), 1e-2, (0.9, 0.95), 1e-8, 0.1)
    with torch.compiler.set_stance("force_eager"):
        for step in range(4):
            for name, grad in gradients_of(step, precision.torch_dtype).items():
                ours[name].grad, theirs[name].grad = grad, grad.clone()
            optimizer.step()
            reference.step()
    for name, parameter in ours.items():
        if (
            moment_blocks(precision.state_bits, SHAPES[name]) is None and precision.dtype == "float32"
        ):  # torch's fused step, which rounds elsewhere
            torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-7)
            continue
        assert torch.equal(parameter, theirs[name]), name
        state, other = optimizer.state[parameter], reference.state[theirs[name]]
        quantized = moment_blocks(precision.state_bits, SHAPES[name]) is not None
        assert quantized == isinstance(getattr(other["exp_avg"], "codes", None), torch.Tensor)
        for moment in ("exp_avg", "exp_avg_sq"):
            if quantized:
                assert torch.equal(state[f"{moment}_codes"].flatten(), other[moment].codes.flatten())
                assert torch.equal(state[f"{moment}_scale"].flatten(), other[moment].scale)
            else:
                assert torch.equal(state[moment], other[moment])
        held = sum(value.nbytes for key, value in state.items() if key != "step")
        assert held == precision.moment_bytes(SHAPES[name], parameter.numel())


@pytest.mark.parametrize("grad_scale", [None, 3.0])
def test_float32_is_torchs_fused_step(grad_scale: float | None) -> None:
    """To the bit; the gradients keep their values, into which torch's step writes those that it used."""
    ours, theirs = parameters_of(torch.float32), parameters_of(torch.float32)
    optimizer = optimizer_of(ours, StatePrecision())
    reference = torch.optim.AdamW(theirs.values(), 1e-2, (0.9, 0.95), 1e-8, 0.1, fused=True)
    for step in range(4):
        scalars = None if grad_scale is None else torch.tensor(grad_scale), torch.tensor(float(step == 2))
        for each in (optimizer, reference):
            each.grad_scale, each.found_inf = scalars
        grads = gradients_of(step, torch.float32)
        for name, grad in grads.items():
            ours[name].grad, theirs[name].grad = grad, grad.clone()
        optimizer.step()
        reference.step()
        assert all(torch.equal(grad, gradients_of(step, torch.float32)[name]) for name, grad in grads.items())
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
        assert all(torch.equal(value, reference.state[theirs[name]][key]) for key, value in optimizer.state[parameter].items()), name


@pytest.mark.parametrize("found_inf", [None, 0.0, 2.0])
@pytest.mark.parametrize("grad_scale", [None, 3.0])
def test_float32_is_one_call_for_each_group(grad_scale: float | None, found_inf: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit the step of each parameter on its own, also of gradients that are transposed or not there and of empty shards."""
    fused, ends = spy_on(monkeypatch, torch, "_fused_adamw_"), []
    for together in (True, False):
        torch.manual_seed(0)
        made = [(f"{size}", nn.Parameter(torch.randn(size, 7))) for size in (0, *range(1, 40))]
        groups = [{"params": made[start::2], "weight_decay": decay} for start, decay in ((0, 0.1), (1, 0.0))]
        optimizer = AdamW(groups, 1e-2, (0.9, 0.95))
        optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale)
        for step in range(3):
            optimizer.found_inf = None if found_inf is None else torch.tensor(found_inf * (step == 1))
            for _, parameter in made[:-2]:
                parameter.grad = torch.randn(7, len(parameter)).t()
            if together:
                optimizer.step()
                counts = [len(call.args[0]) for call in fused.call_args_list]
                assert counts == [18, 19], "of 20 each, one without a gradient in both groups, an empty one in the first"
                fused.reset_mock()
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        optimizer.step_parameter(parameter, group)
        ends.append([value for _, p in made for value in (p.detach(), *optimizer.state[p].values())])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("precision", [StatePrecision(), *KINDS], ids=str)
def test_a_loaded_state_dict_continues(precision: StatePrecision) -> None:
    parameters, again = (parameters_of(precision.torch_dtype) for _ in range(2))
    optimizer, other = optimizer_of(parameters, precision), optimizer_of(again, precision)
    stepped(parameters, optimizer, range(2))
    other.load_state_dict(optimizer.state_dict())
    for name, parameter in again.items():
        parameter.data.copy_(parameters[name].detach())
    for each in ((parameters, optimizer), (again, other)):
        stepped(*each, range(2, 4))
    assert all(torch.equal(parameter, parameters[name]) for name, parameter in again.items())
    wrong = optimizer.state_dict()
    wrong["state"][1] = {**wrong["state"][1], "step": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"AdamW: the state of \w+ is .*want"):
        other.load_state_dict(wrong)


@pytest.mark.parametrize("precision", [StatePrecision(), *KINDS], ids=str)
def test_copies_and_pickles_continue(precision: StatePrecision) -> None:
    parameters = parameters_of(precision.torch_dtype)
    optimizer = optimizer_of(parameters, precision)
    stepped(parameters, optimizer, range(2))
    copies = [copy.deepcopy((parameters, optimizer)), pickle.loads(pickle.dumps((parameters, optimizer)))]
    stepped(parameters, optimizer, range(2, 4))
    for again, other in copies:
        stepped(again, other, range(2, 4))
        assert all(torch.equal(parameter, parameters[name]) for name, parameter in again.items())


@pytest.mark.parametrize("parameter", [torch.zeros(4, 3).t(), torch.zeros(4, dtype=torch.float16)], ids=["transposed", "float16"])
def test_parameters_that_it_cannot_step(parameter: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"AdamW: p is .*want contiguous bfloat16 or float32"):
        optimizer_of({"p": nn.Parameter(parameter)}, StatePrecision())


def test_a_gpu_without_the_kernel_takes_torchs_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; everything else is an error."""
    monkeypatch.setattr(adamw_launcher, "_problem", lambda device: "a GPU of SM75, want SM80 or later")
    results = []
    for step in (optimizer_reference.adamw_step, adamw_launcher.adamw_step):
        parameter, *moments = torch.ones(8), torch.zeros(8), torch.zeros(8)
        scalars = torch.zeros(()), torch.tensor(1e-2), torch.tensor(2.0), torch.tensor(0.0)
        step(parameter, torch.arange(8.0), *moments, None, None, *scalars, 5, (8, 8, 0), (0.9, 0.95, 0.1, 1e-8))
        results.append((parameter, *moments))
    assert all(map(torch.equal, *results))
    values = [torch.zeros(8, dtype=torch.bfloat16) for _ in range(4)]
    with pytest.raises(ValueError, match=r"SM75.*--optimizer adamw --dtype float32"):
        adamw_launcher.adamw_step(*values, None, None, *scalars, 5, (8, 8, 0), (0.9, 0.95, 0.1, 1e-8))


def test_found_inf_above_zero_skips_a_step() -> None:
    parameters = parameters_of(torch.float32)
    optimizer = optimizer_of(parameters, StatePrecision())
    optimizer.found_inf, before = torch.tensor(2.0), {name: parameter.detach().clone() for name, parameter in parameters.items()}
    stepped(parameters, optimizer, range(1))
    assert all(torch.equal(parameter, before[name]) for name, parameter in parameters.items())
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())


@pytest.mark.parametrize("precision", KINDS, ids=str)
def test_squares_of_gradients(precision: StatePrecision) -> None:
    """Squares of the unchanged gradients are added to the sum; none in a skipped step."""
    parameters = parameters_of(precision.torch_dtype)
    optimizer = optimizer_of(parameters, precision)
    optimizer.grad_scale = torch.tensor(4.0)
    grads = gradients_of(0, precision.torch_dtype)
    for skipped in (0.0, 1.0):
        optimizer.found_inf, squares = torch.tensor(skipped), torch.full((), 7.0, dtype=torch.float64)
        for name, parameter in parameters.items():
            parameter.grad = grads[name]
            optimizer.step_parameter(parameter, optimizer.param_groups[0], squares)
        added = sum(float(grad.double().square().sum()) for grad in grads.values())
        assert float(squares) == pytest.approx(7.0 + (0.0 if skipped else added), rel=1e-12)


def test_positions_of_shards_are_found_once(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every step: it takes the host longer than the step itself."""
    mesh = init_device_mesh("cpu", (1,))
    parameters = {name: nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for name, p in parameters_of(torch.bfloat16).items()}
    whole = parameters_of(torch.bfloat16)
    optimizers = [optimizer_of(each, EIGHT_BIT) for each in (parameters, whole)]
    for optimizer in optimizers:
        optimizer.make_states()
    monkeypatch.setattr(adamw, "local_shard", lambda tensor: pytest.fail("looked for a shard in a step"))
    for name, grad in gradients_of(0, torch.bfloat16).items():
        whole[name].grad, parameters[name].grad = grad, distribute_tensor(grad.clone(), mesh, [Shard(0)])
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(parameter.to_local(), whole[name]) for name, parameter in parameters.items())


@pytest.mark.parametrize("precision", KINDS, ids=str)
def test_a_skipped_step_changes_nothing(precision: StatePrecision) -> None:
    parameters = parameters_of(precision.torch_dtype)
    optimizer = optimizer_of(parameters, precision)
    stepped(parameters, optimizer, range(2))
    before = {
        name: [parameter.clone(), *(v.clone() for v in optimizer.state[parameter].values())] for name, parameter in parameters.items()
    }
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    for name, parameter in parameters.items():
        after = [parameter, *optimizer.state[parameter].values()]
        assert all(torch.equal(*pair) for pair in zip(before[name], after, strict=True)), name
    optimizer.found_inf = torch.tensor(0.0)
    stepped(parameters, optimizer, range(2, 3))
    assert all(not torch.equal(parameter, before[name][0]) for name, parameter in parameters.items())
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_gradients_are_divided() -> None:
    ends = []
    for scale in (1.0, 4.0):  # a power of two: the same bits
        parameters = parameters_of(torch.float32)
        optimizer = optimizer_of(parameters, KINDS[0])
        optimizer.grad_scale = torch.tensor(scale)
        for name, grad in gradients_of(0, torch.float32).items():
            parameters[name].grad = grad * scale
        optimizer.step()
        ends.append(parameters)
    assert all(torch.equal(parameter, ends[1][name]) for name, parameter in ends[0].items())


def test_a_seed_has_random_bits_of_its_own() -> None:
    ends = []
    for seed in (0, 0, 1):
        parameters = parameters_of(torch.bfloat16)
        optimizer = optimizer_of(parameters, KINDS[2], seed)
        stepped(parameters, optimizer, range(2))
        ends.append(parameters["matrix"])
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


LAYOUTS: dict[str, tuple[Any, ...]] = {  # of a mesh (2,) or (2, 1)
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "replicas": (Replicate(),),
}


def shards_step_as_the_whole(rank: int, world: int) -> list[str]:
    mesh, refused = init_device_mesh("cpu", (world,)), []
    for precision in KINDS:
        whole = parameters_of(precision.torch_dtype)
        optimizer = optimizer_of(whole, precision)
        stepped(whole, optimizer, range(3))
        for layout, placements in LAYOUTS.items():
            names = [name for name in SHAPES if layout != "columns" or name == "experts"]
            parts = {
                name: nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
                for name, parameter in parameters_of(precision.torch_dtype).items()
                if name in names
            }
            sharded = optimizer_of(parts, precision)
            for step in range(3):
                for name, grad in gradients_of(step, precision.torch_dtype).items():
                    if name in parts:
                        parts[name].grad = distribute_tensor(grad, mesh, placements)  # type: ignore[assignment]
                sharded.step()
            for name, parameter in parts.items():
                assert torch.equal(parameter.full_tensor(), whole[name]), (precision, layout, name)  # type: ignore[attr-defined]
                for key, value in sharded.state[parameter].items():
                    assert key == "step" or isinstance(value, DTensor), "checkpoints want to know the whole"
                    found = value.full_tensor() if isinstance(value, DTensor) else value
                    assert torch.equal(found, optimizer.state[whole[name]][key]), (precision, layout, name, key)
    cut = {name: (shape, Shard(0)) for name, shape in {"a": (18, 384), "b": (30, 256)}.items()} | {"c": ((64, 128), Shard(1))}
    for name, (shape, placement) in cut.items():
        parameter = nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [placement]))
        try:
            optimizer_of({name: parameter}, KINDS[0]).make_states()
        except ValueError as error:
            refused.append(str(error))
    dist.barrier()
    return refused


def test_shards_step_as_the_whole() -> None:
    """To the bit, random bits included, for shards of rows and columns and for replicas; shards that cut a block are refused."""
    for refused in run_ranks(shards_step_as_the_whole, 2):
        assert [message.split(":")[1] for message in refused] == [" a", " c"]
        assert "blocks of 256 values, which the shard (9, 384) of (18, 384) from" in refused[0]
        assert "or use --optimizer adamw" in refused[0]


@pytest.mark.parametrize("precision", KINDS[:2], ids=str)
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, text: str, one_rank: None, precision: StatePrecision) -> None:
    """Also after a step that was skipped; another optimizer or dtype is refused."""
    options = {"data": (text,), "steps": 6, "checkpoint_every": 100, "evaluate": False, **vars(precision)}
    ends = []
    for name, starts in (("straight", [{}]), ("stopped", [{"stop_after": 3}, {"resume": True}])):
        for more in starts:
            run = trainer(0, 1, str(tmp_path / name), len(ends), **options, **more)
            loss, skipped = run.microbatches.loss, run.step_count == 0

            def spoiled(batch: Batch, run: Trainer = run, loss: Any = loss, skipped: bool = skipped) -> torch.Tensor:
                return loss(batch) * (torch.nan if skipped and run.step_count == 1 else 1.0)

            run.microbatches.loss = spoiled  # type: ignore[method-assign]
            run.train()
        ends.append(state_of(run))
    assert len(same(*ends)) == len(ends[0])
    assert {float(value) for name, value in ends[0].items() if name.endswith(".step")} == {5.0}
    model = load_model(tmp_path / "straight").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(torch.equal(parameter, ends[0][name].float()) for name, parameter in model.named_parameters())
    for changed in ({"optimizer": "adamw"}, {"dtype": "float32" if precision.dtype == "bfloat16" else "bfloat16"}):
        ((name, value),) = changed.items()
        with pytest.raises(
            ValueError, match=f"cannot be resumed exactly: {name} was {getattr(precision, name)}, is {value}; give the options"
        ):
            trainer(0, 1, str(tmp_path / "straight"), resume=True, **{**options, "steps": 9, **changed})


def resumed_on_other_degrees(rank: int, world: int, out: str, data: str) -> None:
    options = {
        "data": (data,),
        "checkpoint_every": 100,
        "evaluate": False,
        "optimizer": "adamw8bit",
        "dtype": "bfloat16",
        "cache_weights": True,
    }
    run = trainer(rank, world, out, steps=2, ep=2, **options)
    assert run.train()
    saved = whole_state(run)
    again = [trainer(rank, world, out, steps=4, resume=True, ep=ep, **options) for ep in (1, 2)]
    for other in again:
        found = whole_state(other)
        assert found.keys() == saved.keys()
        assert all(torch.equal(value, saved[name]) for name, value in found.items())
    assert sum("_codes." in name for name in saved) > 20
    losses = [done(other).loss for other in again]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def whole_state(run: Trainer) -> dict[str, torch.Tensor]:
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in run._tensors().items()}
    return {name: value for name, value in whole.items() if not name.endswith("tokens_per_expert")}


def test_resume_on_another_ep_degree(tmp_path: Path, text: str) -> None:
    """Every bit of the state is where it belongs."""
    run_ranks(resumed_on_other_degrees, 2, str(tmp_path), text)


@pytest.mark.parametrize("precision", KINDS, ids=str)
def test_small_updates_add_up(precision: StatePrecision) -> None:
    """Each is a four-hundredth of the distance of two bf16 numbers, which rounding to nearest would lose."""
    parameter = nn.Parameter(torch.ones(64, 128, dtype=precision.torch_dtype))
    optimizer = AdamW([parameter], 1e-5, (0.9, 0.95), weight_decay=0.0, state_bits=precision.state_bits)
    for _ in range(50):
        parameter.grad = torch.full_like(parameter, 3.0)
        optimizer.step()
    assert float(1 - parameter.detach().double().mean()) == pytest.approx(50 * 1e-5, rel=0.1)


@pytest.mark.parametrize("precision", [StatePrecision(), KINDS[0]], ids=str)
def test_a_step_changes_the_version(one_rank: None, precision: StatePrecision) -> None:
    """So that autograd refuses a second backward through what was saved before it; of a DTensor and of its local tensor."""
    whole = torch.ones(64, 128)
    sharded = nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)]))
    parameters = [nn.Parameter(whole), sharded]
    optimizer = AdamW(parameters, state_bits=precision.state_bits)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    written = [*parameters, sharded._local_tensor]
    before = [tensor._version for tensor in written]
    optimizer.step()
    assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))


def test_numbers_are_on_the_parameters_device() -> None:
    parameters = parameters_of(torch.float32)
    optimizer = optimizer_of(parameters, StatePrecision())
    optimizer.found_inf = torch.zeros((), device="meta")
    with pytest.raises(ValueError, match="adamw_step: a tensor on another device than the parameter's, cpu"):
        stepped(parameters, optimizer, range(1))

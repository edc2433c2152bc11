"""peft's LoRA on dense linear layers by `peft_0_21.register`: against float64, compiled, recomputed, and cases that stay peft's own."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from tests.operator_calls import OperatorCalls
from tests.truth import sqnr
from torch import Tensor, nn

import mxep
from mxep.mx import MXWeight, weight_cache

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")
peft = pytest.importorskip("peft", reason="a development tool")

from mxep.integrations import peft_0_21  # noqa: E402


class Dense(nn.Module):
    """A linear layer of each kind that can have adapters."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 96, bias="bias" in kind, dtype=dtype)
        if "MXLinear" in kind:
            mxep.convert_linears(self, "proj", "mxfp8_gemm")
        if "frozen in MX" in kind:
            mxep.quantize_base(self)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x)
        return y


DENSE = ("torch", "torch, bias", "torch, frozen in MX", "MXLinear, frozen in MX")


def dense(kind: str, dtype: torch.dtype = torch.bfloat16, ours: bool = True, **changes: Any) -> Any:
    """Such a layer with an adapter whose product is not 0; the layer itself is `.base_model.model.proj`."""
    torch.manual_seed(4)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["proj"]} | changes)
    model = peft.get_peft_model(Dense(kind, dtype), peft_0_21.register(config) if ours else config)
    return with_random_adapters(model)


def with_random_adapters(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def rows_of(seed: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(3, 40, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(model: Any, function: Any = None, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Output and gradients of the input and of the adapters."""
    model.zero_grad()
    x = rows_of(1, 64, dtype).requires_grad_()
    y = (model if function is None else function)(x)
    y.backward(rows_of(2, 96, y.dtype))
    adapters = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"y": y.detach(), "x": x.grad} | adapters


@pytest.mark.parametrize("changes", [{}, {"lora_alpha": 3}, {"use_rslora": True}, {"two": True}], ids=["one", "alpha", "rslora", "two"])
@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_layer_against_float64(kind: str, changes: dict[str, bool]) -> None:
    two, changes = "two" in changes, {name: value for name, value in changes.items() if name != "two"}
    model = dense(kind, **changes)
    layer = model.base_model.model.proj
    assert type(layer) is peft_0_21.LoraLinear
    if two:
        model.add_adapter("other", peft_0_21.register(peft.LoraConfig(r=2, lora_alpha=1, target_modules=["proj"])))
        model.base_model.set_adapter(["default", "other"])
        with_random_adapters(model)
    got = results(model)
    factors = {name: parameter for name, parameter in layer.named_parameters() if "lora_" in name}
    assert {parameter.dtype for parameter in factors.values()} == {torch.float32}
    exact = {name: parameter.detach().double().requires_grad_() for name, parameter in factors.items()}
    base = layer.get_base_layer()
    weight = base.weight.dequantize() if isinstance(base.weight, MXWeight) else base.weight
    x = rows_of(1, 64).double().requires_grad_()
    y = nn.functional.linear(x, weight.double(), None if base.bias is None else base.bias.double())
    for name in layer.active_adapters:
        y = y + layer.scaling[name] * (x @ exact[f"lora_A.{name}.weight"].T) @ exact[f"lora_B.{name}.weight"].T
    y.backward(rows_of(2, 96).double())
    want = {"y": y, "x": x.grad} | {f"base_model.model.proj.{name}": value.grad for name, value in exact.items()}
    assert set(got) == set(want)
    for name, value in want.items():
        assert sqnr(value, got[name]) > (17 if "MXLinear" in kind and name in "xy" else 45), name


@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_layer_is_one_node(kind: str) -> None:
    """One autograd function for the base and its adapter, on the parameters themselves; a frozen weight is read past the dispatcher."""
    model, x = dense(kind), rows_of(1, 64).requires_grad_()
    y = model(x)
    assert y.grad_fn.name() == "_DenseMMBackward"
    learning = {x, *(parameter for parameter in model.parameters() if parameter.requires_grad)}
    assert {node.variable for node, _ in y.grad_fn.next_functions if node is not None} == learning

    def called(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("MXWeight.__torch_dispatch__")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MXWeight, "__torch_dispatch__", called)
        model(x).sum().backward()


def test_only_gemms_make_tensors_of_a_dense_layers_size() -> None:
    model = dense("torch")
    x, dy = rows_of(1, 64).requires_grad_(), rows_of(2, 96)
    made = set[tuple[str, torch.dtype]]()

    def note(function: Any, args: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.numel() >= x.numel():
            made.add((function.overloadpacket.__name__, result.dtype))

    with OperatorCalls(note):
        model(x).backward(dy)
    views = {"view", "t", "_unsafe_view", "detach", "alias", "transpose"}
    assert {(name, dtype) for name, dtype in made if name not in views} == {("mm", torch.bfloat16), ("addmm_", torch.bfloat16)}


@pytest.mark.parametrize("kind", ["torch", "torch, frozen in MX", "MXLinear, frozen in MX", "torch, adapters in bf16"])
def test_a_dense_layer_compiled_and_recomputed(kind: str) -> None:
    model = dense(kind)
    if "adapters" in kind:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.bfloat16() if "lora_" in name else parameter.data
    want = results(model)
    torch._dynamo.reset()
    compiled = torch.compile(model.base_model.model.proj, backend="aot_eager", fullgraph=True)

    def recomputed(x: Tensor) -> Tensor:
        y: Tensor = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)  # type: ignore[assignment]
        return y

    for function in (compiled, recomputed):
        got = results(model, function)
        assert set(got) == set(want)
        for name, value in want.items():
            assert torch.equal(got[name], value), name
    for scaling in (0.5, 3.0):
        model.base_model.model.proj.scaling["default"] = scaling
        assert torch.equal(results(model, compiled)["y"], results(model)["y"])


def test_a_dense_layer_under_autocast_with_dropout_and_without_gradients() -> None:
    ours, own = dense("torch", torch.float32), dense("torch", torch.float32, ours=False)
    for name, value in results(own, dtype=torch.float32).items():
        assert sqnr(value, results(ours, dtype=torch.float32)[name]) > 100, name
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (results(model, dtype=torch.float32) for model in (ours, own))
    assert got["y"].dtype == want["y"].dtype == torch.bfloat16
    for name, value in want.items():
        assert sqnr(value, got[name]) > 40, name
    found = []
    for model in (dense("torch", torch.float32, ours, lora_dropout=0.4) for ours in (True, False)):
        torch.manual_seed(0)
        found.append(results(model.train(), dtype=torch.float32))
        with torch.no_grad():
            found[-1]["eval"] = model.eval()(rows_of(1, 64, torch.float32))
    for name, value in found[1].items():
        assert sqnr(value, found[0][name]) > 100, name
    x = rows_of(1, 64)  # of an embedding that is frozen
    model = dense("torch")
    model(x).sum().backward()
    assert x.grad is None
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "lora_" in name)


def test_a_dense_layer_that_learns_and_factors_that_are_frozen() -> None:
    ours, own = (dense("torch, bias", torch.float32, whose) for whose in (True, False))
    for frozen in ("", "lora_A", "lora_B"):
        for name, parameter in (*ours.named_parameters(), *own.named_parameters()):
            parameter.requires_grad_(not frozen or frozen not in name)
        got, want = (results(model, dtype=torch.float32) for model in (ours, own))
        assert set(got) == set(want)
        assert all(sqnr(value, got[name]) > 100 for name, value in want.items())


@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_layer_without_a_graph(kind: str) -> None:
    model, x = dense(kind), rows_of(1, 64)
    want = model(x.clone().requires_grad_())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(model(x), want)


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (1,), (3, 1, 5)], ids=str)
@pytest.mark.parametrize("kind", DENSE)
def test_rows_of_a_dense_layer_of_any_shape_and_strides(kind: str, lead: tuple[int, ...]) -> None:
    """As the same rows in order in one matrix; without rows the gradients are zeros."""
    model, found = dense(kind), []
    x, dy = (torch.randn(width, *lead, generator=torch.Generator().manual_seed(width)).bfloat16().movedim(0, -1) for width in (64, 96))
    for rows, dys in ((x, dy), (x.reshape(-1, 64).contiguous(), dy.reshape(-1, 96).contiguous())):
        model.zero_grad()
        rows = rows.detach().requires_grad_()
        y = model(rows)
        assert (y.shape, y.dtype) == (dys.shape, torch.bfloat16)
        y.backward(dys)
        grads = [parameter.grad.clone() for name, parameter in model.named_parameters() if "lora_" in name]
        found.append([y.detach().flatten(), rows.grad.flatten(), *grads])
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
    assert x.numel() or not any(grad.count_nonzero() for grad in found[0])


@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_layer_twice_in_a_graph_copied_and_recomputed_reentrantly(kind: str) -> None:
    model = dense(kind)
    want = results(model)
    copied = copy.deepcopy(model)
    assert all(torch.equal(value, want[name]) for name, value in results(copied).items())
    again = results(model, lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True))
    assert all(torch.equal(value, want[name]) for name, value in again.items())
    twice = results(model, lambda x: model(x) + model(x))
    assert set(twice) == set(want)
    assert all(torch.equal(value, 2 * want[name]) for name, value in twice.items())


def test_a_dense_layer_below_the_rows_of_mx() -> None:
    """By `hp_below_rows` the layer multiplies in high precision, as the same layer of torch does."""
    mx, plain = dense("MXLinear, frozen in MX"), dense("torch, frozen in MX")
    mx.base_model.model.proj.get_base_layer().recipe = dataclasses.replace(mxep.Recipe.named("mxfp8_gemm"), hp_below_rows=1000)
    got, want = results(mx), results(plain)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_dense_layer_with_hooks_and_with_dropout_and_two_adapters() -> None:
    """As peft runs them: a hook sees the base's own result."""
    for hooked in (True, False):
        found, seen = [], list[Tensor]()
        for ours in (True, False):
            model = dense("torch", torch.float32, ours, lora_dropout=0.0 if hooked else 0.4)
            layer = model.base_model.model.proj
            if hooked:
                layer.get_base_layer().register_forward_hook(lambda module, args, y: seen.append(y.clone()))  # noqa: B023
            else:
                model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=1, lora_dropout=0.4, target_modules=["proj"]))
                model.base_model.set_adapter(["default", "other"])
                with_random_adapters(model)
            torch.manual_seed(0)
            found.append(results(model.train(), dtype=torch.float32))
        assert set(found[0]) == set(found[1])
        assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
        assert len(seen) == 2 * hooked
        assert not hooked or torch.equal(*seen)


@pytest.mark.parametrize("letter", ["A", "B"])
def test_factors_with_a_hook_or_a_forward_of_their_own(letter: str) -> None:
    """Both double the result of the factor, which peft's own implementation does."""
    for by_hook in (True, False):
        found = []
        for ours in (True, False):
            model = dense("torch", torch.float32, ours)
            factor = getattr(model.base_model.model.proj, f"lora_{letter}")["default"]
            if by_hook:
                factor.register_forward_hook(lambda module, args, y: 2 * y)
            else:
                factor.forward = lambda x, factor=factor: 2 * type(factor).forward(factor, x)
            found.append(results(model, dtype=torch.float32))
        assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_a_dense_layer_that_peft_computes_itself(changes: dict[str, bool]) -> None:
    got, want = (results(dense("torch, bias", ours=ours, **changes)) for ours in (True, False))
    assert set(got) == set(want)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_dense_layer_switched_off_merged_and_unmerged() -> None:
    model, x = dense("torch"), rows_of(1, 64)
    base, want = model.base_model.model.proj.get_base_layer(), model(x)
    with model.disable_adapter():
        assert torch.equal(model(x), base(x))
    model.merge_adapter()
    assert sqnr(want, model(x)) > 40
    assert torch.equal(model(x), base(x))
    model.unmerge_adapter()
    assert sqnr(want, model(x)) > 40
    names = ["default", "__base__", "default"]
    assert torch.equal(model.eval()(x, adapter_names=names)[1], base(x)[1])


def test_a_dense_layer_is_not_stored_transposed() -> None:
    with pytest.warns(UserWarning, match="fan_in_fan_out=True, want False"):
        model = dense("torch", fan_in_fan_out=True)
    assert model.base_model.model.proj.get_delta_weight("default").shape == (96, 64)


def test_a_dense_layer_of_another_class_is_pefts_own() -> None:
    class Other(nn.Linear):
        pass

    model = Dense("torch")
    model.proj = Other(64, 96)
    wrapped = peft.get_peft_model(model, peft_0_21.register(peft.LoraConfig(target_modules=["proj"])))
    assert type(wrapped.base_model.model.proj) is peft.tuners.lora.Linear


def test_merging_reaches_kept_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """peft writes to `weight.data`, which a cache does not see; where values are checked it would be an error."""
    monkeypatch.setattr(weight_cache, "checking", lambda device: False)
    model = dense("MXLinear", torch.float32)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    cache = mxep.parallel.cache_quantized_weights(model, optimizer)
    x = rows_of(2, 64, torch.float32)
    with torch.no_grad():
        beside = model(x)
        for change in (model.merge_adapter, model.unmerge_adapter):
            change()
            kept = model(x)
            cache.advance()
            assert torch.equal(kept, model(x))
            assert sqnr(beside, kept) > 20

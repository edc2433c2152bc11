"""Replayed calls have the bits, the memory and the errors of the calls that they replace (`mxep.ops.runtime.replay`)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import mxep
from mxep.fused.autograd import is_fused
from mxep.mx.weight_cache import WeightCache
from mxep.ops.runtime import replay
from mxep.ops.runtime.for_backward import Packing
from mxep.parallel import MXLinear
from mxep.recipe import RECIPES

pytestmark = pytest.mark.gpu
CALLS = 20  # four plain, two recorded, the rest replayed, at last by graphs
D, H, N, EXPERTS, CHOICES, TOKENS = 256, 128, 192, 8, 2, 384
NAMES = ("hp", "mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8")

Run = Callable[[int], list[Tensor]]  # one call, by its number -> all that it makes


@pytest.fixture(autouse=True)
def no_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MXEP_CHECK", "0")  # in checking mode all calls run as they are
    replay._calls.clear()
    yield
    replay._calls.clear()


def values(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def poison() -> None:
    """Fills memory that the next allocations get with NaN."""
    held = [torch.full((size // 4,), float("nan"), device="cuda") for size in (1 << 20, 1 << 18, 1 << 16, 1 << 14) for _ in range(12)]
    del held


def replayed_sequences() -> list[replay._Sequence]:
    return [call.sequence for call in replay._calls.values() if call.sequence is not None]


def graphs() -> int:
    """Graphs of all sequences."""
    runs = [part for sequence in replayed_sequences() for part, _ in sequence._parts if isinstance(part, replay._Run)]
    return sum(graph is not None for run in runs for graph in run._graphs.values())


def check(run: Run, monkeypatch: pytest.MonkeyPatch, sequences: int, packs: bool = False) -> None:
    """Every call has the bits of a plain one, and at least so many sequences were replayed; with `packs` one of them for packed tensors."""
    made = []
    for number in range(CALLS):
        poison()
        made.append([(tensor.stride(), tensor.cpu()) for tensor in run(number)])  # whose memory is that of the next call's results
    problems = [call.problem for call in replay._calls.values()]
    assert len(replayed_sequences()) >= sequences, problems
    assert graphs() or not sequences
    # What a replayed forward leaves to backward is packed, so that backward is recorded once more.
    packed = [call for key, call in replay._calls.items() if any(type(fact) is tuple and type(fact[-1]) is Packing for fact in key[-1])]
    assert all(call.sequence is not None for call in packed), problems
    assert packed or not packs
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_runs_on", lambda device: False)
        for number, got in enumerate(made):
            for want, (strides, have) in zip(run(number), got, strict=True):
                assert want.dtype == have.dtype
                assert want.stride() == strides
                assert torch.equal(want.cpu().contiguous().view(torch.uint8), have.contiguous().view(torch.uint8)), number


def linear_run(name: str, bias: bool = False, kept: bool = False, shape: tuple[int, ...] = (TOKENS,)) -> Run:
    linear = torch.nn.Linear(D, N, bias=bias, dtype=torch.bfloat16, device="cuda")
    layer, cache = MXLinear(linear, RECIPES[name]), WeightCache()
    if kept:
        layer.keep_quantized(cache)

    def run(number: int) -> list[Tensor]:
        with torch.no_grad():
            linear.weight.copy_(values(100 + number, N, D))
        cache.advance()
        x = values(number, *shape, D).requires_grad_()
        out = layer(x)
        grads = torch.autograd.grad(out, [x, *linear.parameters()], values(200 + number, *shape, N))
        return [out.detach(), *grads]

    return run


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("kept", [False, True])
def test_linear(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(linear_run(name, kept=kept), monkeypatch, 2)


def test_linear_with_a_bias_and_several_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    check(linear_run("mxfp8_wgrad_with_mx", bias=True, shape=(3, 128)), monkeypatch, 2)


def test_linear_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    run = linear_run("mxfp8_wgrad_with_mx")

    def under(number: int) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            return run(number)

    check(under, monkeypatch, 2)


def test_another_stream_and_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    run, streams = linear_run("mxfp8_wgrad_with_mx"), [torch.cuda.Stream(), torch.cuda.Stream()]

    def elsewhere(number: int) -> list[Tensor]:
        stream = streams[number % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(number % 3 == 0):
            made = run(number)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in made:
            tensor.record_stream(torch.cuda.current_stream())
        return made

    check(elsewhere, monkeypatch, 2)


def experts_run(name: str, gated: bool = True, dtype: torch.dtype = torch.bfloat16, one_storage: bool = False) -> Run:
    shapes = (EXPERTS, H, D), (EXPERTS, D, H), (EXPERTS, H, D)
    if one_storage:  # as FSDP gathers them
        sizes = [a * b * c for a, b, c in shapes]
        parts = torch.empty(sum(sizes), dtype=dtype, device="cuda").split(sizes)
        weights = [part.view(shape).requires_grad_() for part, shape in zip(parts, shapes, strict=True)]
    else:
        weights = [torch.empty(shape, dtype=dtype, device="cuda").requires_grad_() for shape in shapes]
    w1, w2, w3 = weights
    used = weights if gated else weights[:2]

    def run(number: int) -> list[Tensor]:
        with torch.no_grad():
            for i, weight in enumerate(used):
                weight.copy_(values(100 * i + number, *weight.shape) / weight.shape[-1] ** 0.5)
        x, logits = values(number, TOKENS, D).requires_grad_(), values(300 + number, TOKENS, EXPERTS, dtype=torch.float32)
        scores, choices = logits.softmax(-1).topk(CHOICES)
        scores = scores.detach().requires_grad_()
        activation = "swiglu" if gated else "relu2"
        arguments = x, choices, scores, w1, None, w2, None, EXPERTS
        out = mxep.fused_experts(*arguments, w3=w3 if gated else None, group="", recipe=name, activation=activation)
        return [out.detach(), *torch.autograd.grad(out, [x, scores, *used], values(400 + number, TOKENS, D))]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(experts_run(name), monkeypatch, 3, packs=True)


def test_experts_without_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    check(experts_run("mxfp8_wgrad_with_mx", gated=False), monkeypatch, 3, packs=True)


def test_experts_with_float32_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    check(experts_run("mxfp8_wgrad_with_hp", dtype=torch.float32), monkeypatch, 0)


def test_experts_in_one_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    check(experts_run("mxfp8_wgrad_with_mx", one_storage=True), monkeypatch, 3, packs=True)


RUNTIMES = {
    "quantised on the wire": {
        "dispatch_forward": "mxfp8",
        "combine_forward": "mxfp8",
        "combine_backward": "mxfp8",
        "dispatch_backward": "mxfp8",
    },
    "a row for each choice": {"dispatch": "all_to_all", "combine": "all_to_all"},
    "gate and up in MX": {"keep_first_product": "mxfp8"},
    "nothing kept": {"keep_first_product": False, "redispatch_x_in_backward": True, "keep_dgrad_weights": False},
    "chunks": {"scratch_rows": 512},
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", NAMES[1:3])
def test_options_biases_and_an_adapter(runtime: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"w1": (EXPERTS, 2 * H, D), "b1": (EXPERTS, 2 * H), "w2": (EXPERTS, D, H), "b2": (EXPERTS, D)}
    adapter = {"a1": (EXPERTS, 16, D), "b1": (EXPERTS, 2 * H, 16), "a2": (EXPERTS, 16, H), "b2": (EXPERTS, D, 16)}
    tensors = {n: torch.empty(shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for n, shape in shapes.items()}
    factors = {n: torch.empty(shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for n, shape in adapter.items()}
    config, learn = mxep.RuntimeEPConfig(**RUNTIMES[runtime]), [*tensors.values(), *factors.values()]

    def run(number: int) -> list[Tensor]:
        with torch.no_grad():
            for i, tensor in enumerate(learn):
                tensor.copy_(values(100 * i + number, *tensor.shape) / tensor.shape[-1] ** 0.5)
        x, logits = values(number, TOKENS, D).requires_grad_(), values(300 + number, TOKENS, EXPERTS, dtype=torch.float32)
        logits[:, number % EXPERTS] = -float("inf")  # an expert without tokens
        scores, choices = logits.softmax(-1).topk(CHOICES)
        weights = tensors["w1"], tensors["b1"], tensors["w2"], tensors["b2"], EXPERTS, config
        out = mxep.fused_experts(
            x, choices, scores, *weights, group="", recipe=name, layout="interleaved", lora=mxep.moe.ExpertLora(**factors),
            swiglu=mxep.SwiGLU(limit=7.0, alpha=1.702, offset=1.0),
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, [x, *learn], values(400 + number, TOKENS, D))]

    check(run, monkeypatch, 0 if runtime == "chunks" else 3, packs=runtime != "chunks")


def test_frozen_weights_in_mx_and_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(D, N, bias=False, dtype=torch.bfloat16, device="cuda"))
    mxep.convert_linears(layer, recipe="mxfp8_wgrad_with_mx")
    mxep.quantize_base(layer)
    run = experts_run("mxfp8_wgrad_with_mx")

    def both(number: int) -> list[Tensor]:
        x = values(number, TOKENS * (number % 2), D).requires_grad_()
        out = layer(x)
        return [out.detach(), *torch.autograd.grad(out, [x], values(700 + number, *out.shape)), *run(number)]

    check(both, monkeypatch, 3, packs=True)


def test_grouped_mm_adds_to_a_main_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(EXPERTS, N, D, dtype=torch.bfloat16, device="cuda").requires_grad_()

    def run(number: int) -> list[Tensor]:
        with torch.no_grad():
            weight.copy_(values(100 + number, EXPERTS, N, D))
        a, main = values(number, TOKENS, D).requires_grad_(), values(200 + number, EXPERTS, N, D, dtype=torch.float32)
        offs = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * (TOKENS // EXPERTS)
        offs[-2] = offs[-1]
        arguments = a, weight.transpose(-2, -1), offs
        out = mxep.to_mxfp8_then_scaled_grouped_mm(*arguments, wgrad_with_hp=True, main_grad=main)
        out.backward(values(300 + number, TOKENS, N))
        assert a.grad is not None
        return [out.detach(), a.grad, main]

    check(run, monkeypatch, 2)


def test_layers_take_turns_and_a_graph_captures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [experts_run("mxfp8_wgrad_with_mx"), experts_run("mxfp8_wgrad_with_mx"), linear_run("mxfp8_wgrad_with_mx")]

    def turns(number: int) -> list[Tensor]:
        return [tensor for run in runs for tensor in run(number)]

    check(turns, monkeypatch, 6, packs=True)
    linear = MXLinear(torch.nn.Linear(D, N, bias=False, dtype=torch.bfloat16, device="cuda"), RECIPES["mxfp8_wgrad_with_mx"])
    x, graph = values(1, TOKENS, D), torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(CALLS):
            want = linear(x)
        with torch.cuda.graph(graph):
            got = linear(x)
        x.copy_(values(2, TOKENS, D))
        graph.replay()
        assert not torch.equal(got, want)
        assert torch.equal(got, linear(x))


@pytest.mark.parametrize("name", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_layer(name: str, kept: bool, recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = mxep.MoEConfig(D, H, EXPERTS, CHOICES, balance_loss=0.01, z_loss=0.001)
    layer = mxep.FusedMoE(config, name).to("cuda", torch.bfloat16)
    cache = WeightCache()
    if kept:
        layer.experts.keep_quantized(cache)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]

    def run(number: int) -> list[Tensor]:
        with torch.no_grad():
            for i, parameter in enumerate(parameters):
                parameter.copy_(values(50 * i + number, *parameter.shape) / parameter.shape[-1] ** 0.5)
        cache.advance()
        x = values(number, TOKENS, D).requires_grad_()
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        return [out.detach(), *torch.autograd.grad(out, [x, *parameters], values(600 + number, TOKENS, D))]

    check(run, monkeypatch, 3, packs=not recomputes)


@pytest.mark.parametrize("kept", [False, True])
def test_saved_bytes(kept: bool) -> None:
    """The same in a replayed call, which packs what it saves: one tensor beside the input, the choices, weights and their forms."""
    layer = mxep.FusedMoE(mxep.MoEConfig(D, H, EXPERTS, CHOICES), "mxfp8_wgrad_with_mx").to("cuda", torch.bfloat16)
    layer.init_weights(0.1)
    if kept:
        layer.experts.keep_quantized(WeightCache())
    found, tensors = [], []
    for number in range(CALLS):
        out = layer(values(number, TOKENS, D).requires_grad_())
        found.append(mxep.moe.saved_bytes(out))
        node = out.grad_fn
        while not is_fused(node):
            node = node.next_functions[0][0]  # type: ignore[union-attr]
        tensors.append(sum(tensor is not None for tensor in node.saved_tensors))  # type: ignore[union-attr]
        out.sum().backward()
    assert found == [found[0]] * CALLS
    weights = 4  # with the router's
    assert tensors[-1] == weights + 3 + (4 if kept else 0) < tensors[0]


def test_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = mxep.FusedMoE(mxep.MoEConfig(D, H, EXPERTS, CHOICES), "mxfp8").to("cuda", torch.bfloat16)
    for i, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(values(50 * i, *parameter.shape) / parameter.shape[-1] ** 0.5)

    def run(number: int) -> list[Tensor]:
        with torch.inference_mode():
            return [layer(values(number, TOKENS, D))]

    check(run, monkeypatch, 1)


def test_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_LARGE", 1 << 14)
    run, peaks = experts_run("mxfp8_wgrad_with_mx"), []
    gc.collect()  # tensors of other tests, which would count as allocated before the first call and not as its peak
    for number in range(CALLS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(number)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert len(replayed_sequences()) >= 3
    assert peaks[-1] <= 1.02 * peaks[0]


def test_large_calls_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_BYTES", 1 << 16)
    check(experts_run("mxfp8_wgrad_with_mx"), monkeypatch, 0)
    assert not replayed_sequences()
    assert all((call.problem or "").startswith("it allocates ") for call in replay._calls.values())

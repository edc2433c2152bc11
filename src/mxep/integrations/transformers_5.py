"""transformers 5: routed experts in MXFP8, and under expert parallelism the exchange of their tokens, by transformers' own registries.

`register()` makes the name "mxep" known there.  `experts_implementation="mxep"` computes a model's experts by a recipe, in one process or
inside any parallelism of transformers; `DistributedConfig(..., ep_implementation="mxep")` exchanges tokens by it too.  Nothing of
transformers is patched; parameters, their names and checkpoints are its own.  `accelerate()` converts one loaded model: its experts, the
dense linear layers that gain, its loss, its norms, and its rotary embeddings.

before    tokens (T, D) of this rank, their choices (T, C) and scores (T, C), from the model's router
after     (T, D), the experts' rows weighted and summed over a token's choices; float32, rounded once
host syncs  none on one rank, and none for experts with one of mxep's activations over symmetric memory; else one, for the splits
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from mxep.ep.blocks import combine, dispatch, permute, unpermute
from mxep.ep.exchange_plan import ExchangePlan
from mxep.ep.token_sort import combine_topk, sort_tokens_by_expert
from mxep.extras import install_command
from mxep.fused.layer import fused_experts
from mxep.grouped_mm.function import expert_mm
from mxep.moe.expert_mlp import ExpertLora, ExpertWeights
from mxep.moe.ffn import expert_ffn, runs_fused
from mxep.ops.activation.functions import SwiGLU
from mxep.parallel.conversion import converted_recipe
from mxep.parallel.forwards import replaced_by
from mxep.parallel.linears import MXLinear, convert_linears, switch_linears, why_linear_stays
from mxep.parallel.module_names import shown_names
from mxep.parallel.undo_conversion import unconvert
from mxep.placements import redistribute, to_local
from mxep.recipe import Recipe, resolve_recipe
from mxep.shapes import MX_BLOCK

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    from transformers.integrations.moe import ExpertsInterface

    from mxep.integrations.transformers_activations import ExpertActivation, activation_of
    from mxep.integrations.transformers_liger import convert_norm, convert_rotary, norm_kernel, rms_norm_form, rotary_form, why_modules_stay
    from mxep.integrations.transformers_loss import convert_loss, is_loss_converted, why_loss_stays
    from mxep.integrations.transformers_router import convert_router, router_form
except ImportError as error:
    try:
        _got = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        _got = "not installed"
    raise ImportError(f"{__name__}: transformers is {_got}, want 5.23 or later; {install_command('transformers')} ({error})") from error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

Module = Any  # one of transformers' classes of experts, whose attributes its decorator `use_experts_implementation` adds
_Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]  # of `fused_experts`, from x to b2
_RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))
_FACTORS = "_mxep_lora_factors"  # attribute of experts with adapters
_OWN_FORWARD = "a forward of its own replaces that of its class (a hook, an offload)"
_FORM = ("is_transposed", "has_gate", "has_bias", "has_post_expert_norm")  # of them, what says how they are stored and computed
_HIGH_PRECISION = Recipe.named("hp")  # of adapters
_IMPLEMENTATION = "_mxep_implementation"  # attribute of experts that `accelerate` has converted
_log = logging.getLogger(__name__)
_OWN = {"eager", *ExpertsInterface(), *EPImplementationInterface()}  # as they are before `register`


def register(recipe: str | Recipe | None = None, name: str = "mxep") -> None:
    """Make a recipe known to transformers, before a model is loaded: as an experts implementation and as an EP implementation.

    Args:
        recipe: a `Recipe`, a preset's name, or None for the default preset.
        name: of both; one for each recipe where several are wanted.  Registering a name again changes its recipe from here on;
            exchanges of models that are loaded already keep theirs.

    Raises:
        ValueError: an unknown recipe, or a name that is one of transformers' own.

    Examples:
        >>> from mxep.integrations import transformers_5
        >>> transformers_5.register("mxfp8_wgrad_with_mx", name="mxep_example")
        >>> # model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="mxep_example")
    """
    resolved = resolve_recipe(recipe)
    if name in _OWN:
        raise ValueError(f"{__name__}.register: name={name!r} is transformers' own, want another one; 'mxep' is the default")
    ExpertsInterface.register(name, functools.partial(experts_forward, recipe=resolved))
    EPImplementationInterface.register(name, functools.partial(ExpertExchange, recipe=resolved))


def experts_forward(experts: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, recipe: Recipe) -> Tensor:
    """Tokens (T, D), choices (T, C) int, scores (T, C) -> (T, D) in the tokens' dtype, by experts of transformers that are all here.

    transformers' own EP implementations number a choice on another rank as `num_experts`; it adds nothing here.  Experts with one of mxep's
    activations run as one function, by recipes with MXFP8 GEMMs and no 32x1 blocks.  With adapters they do so by recipes in high precision
    too, since the activation is then in float32.  Otherwise each choice is one row of two grouped GEMMs: for other experts and recipes, and
    where a rank has fewer experts than a token has choices.

    Raises ValueError for weights of another dtype than bfloat16 or float32, and for widths that are no multiples of 32 in MXFP8.
    """
    elsewhere = 1 if experts._is_expert_parallel else 0
    tokens, choices = hidden_states.to(_row_dtype(experts)), top_k_index.long()
    few, lora = choices.shape[1] > experts.num_experts, _lora(experts, tokens.dtype)
    as_one = runs_fused(recipe) or (recipe.gemm == "hp" and (lora.a1 is not None or lora.a2 is not None))
    how = None if few or not as_one else _activation_of_fused(experts)
    if how is not None:
        first, second = _parameters(experts)
        choices = choices.masked_fill(choices == experts.num_experts, -1) if elsewhere else choices
        operands, fields_of_recipe = (tokens, choices, top_k_weights, *first, *second), tuple(getattr(recipe, f) for f in _RECIPE_FIELDS)
        form = how.activation, how.layout, *how.swiglu
        y = _fused_on_one_rank(operands, tuple(lora), experts.num_experts, fields_of_recipe, form)
        return y.to(hidden_states.dtype)
    rows, order, counts = sort_tokens_by_expert(tokens, choices, experts.num_experts + elsewhere)
    out = _products(experts, rows, counts[: experts.num_experts], recipe, pad_groups=recipe.wgrad == "mxfp8")  # 32x1 blocks
    return combine_topk(out, order, choices.shape[1], top_k_weights.float()).to(hidden_states.dtype)


@torch._dynamo.allow_in_graph  # dynamo writes a call of it into its graph; what is in it is traced after that, by AOTAutograd
def _fused_on_one_rank(
    operands: _Operands, lora: tuple[Any, ...], num_experts: int, recipe: tuple[Any, ...], how: tuple[Any, ...]
) -> Tensor:
    """`fused_experts` from plain tuples, which a graph can hold.

    `lora`: the tensors of an `ExpertLora`.  `recipe`: the fields of a `Recipe`.  `how`: those of an `ExpertActivation`, with the numbers of
    its SwiGLU last.
    A graph depends on the arguments alone: everything else that is read in here keeps its value from tracing.
    """
    (activation, layout, *form), alone = how, _on_one_rank(*map(_without_symbol, recipe))
    options: dict[str, Any] = {"activation": activation, "layout": layout, "swiglu": SwiGLU(*map(_without_symbol, form))}
    return fused_experts(*operands, num_experts=int(num_experts), group="", recipe=alone, lora=ExpertLora(*lora), **options)


def _without_symbol(value: Any) -> Any:
    """A number that may be a symbol, as it is with `torch.compile(dynamic=True)`: the graph is then for that number alone."""
    return int(value) if isinstance(value, torch.SymInt) else float(value) if isinstance(value, torch.SymFloat) else value


class ExpertExchange(EPImplementation):
    """Each choice's token to its expert and back, and the experts' products, by a recipe.

    Experts with one of mxep's activations run as one function (`mxep.fused_experts`): a token is sent once to each rank, however many
    of its experts are there.  Other experts (another activation or gate, a norm after each expert) get a row for each choice.

    Ranks of a tensor parallel group hold the same tokens: each sends a slice of them, and the slices' outputs are gathered again.
    """

    def __init__(self, experts: Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, recipe: Recipe) -> None:
        """Raises ValueError for experts that cannot be computed here, so that loading the model fails and not its first step."""
        unknown = [name for name in _FORM if not hasattr(experts, name)]
        if unknown:
            raise ValueError(
                f"{__name__}: {type(experts).__name__} without {', '.join(unknown)}, want experts of transformers' "
                "use_experts_implementation, which says how they are stored; use ep_implementation='auto'"
            )
        _row_dtype(experts)
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts, self.recipe = experts, recipe
        self.num_experts: int = experts.num_experts * ep_mesh.size()

    @torch.compiler.disable  # the splits need the host
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens (T, D), choices (T, C) int of all E experts, scores (T, C) -> (T, D) in the tokens' dtype."""
        dtype, activation = _row_dtype(self.experts), _activation_of_fused(self.experts)
        tokens, choices, scores = (self._slice(t) for t in (hidden_states.to(dtype), top_k_index.long(), top_k_weights.float()))
        if activation is None:
            y = self._through_blocks(tokens, choices, scores)
        else:
            (w1, b1), (w2, b2) = _parameters(self.experts)
            lora = _lora(self.experts, dtype)
            options = {"group": self.ep_mesh.get_group(), "recipe": self.recipe, "lora": lora, **activation._asdict()}
            y = fused_experts(tokens, choices, scores, w1, b1, w2, b2, self.num_experts, **options)
        return self._whole(y, hidden_states.shape[0]).to(hidden_states.dtype)

    def _through_blocks(self, tokens: Tensor, choices: Tensor, scores: Tensor) -> Tensor:
        """`__call__` for this rank's tokens, by the five blocks, with a row for each choice."""
        rows, order, counts = sort_tokens_by_expert(tokens, choices, self.num_experts)
        plan = ExchangePlan.from_counts(counts, self.ep_mesh.get_group())
        padded = permute(dispatch(rows, plan, self.recipe), plan, self.recipe)
        out = _products(self.experts, padded.rows, padded.padded_counts, self.recipe)
        out = combine(unpermute(out, padded), plan, self.recipe)
        return combine_topk(out, order, choices.shape[1], scores)

    def _slice(self, same: Tensor) -> Tensor:
        """This rank's slice of what every rank of its TP group has."""
        if self.tp_mesh.size() == 1:
            return same
        return redistribute(same, self.tp_mesh, Replicate(), Shard(0), gradient=Shard(0))

    def _whole(self, mine: Tensor, count: int) -> Tensor:
        """`count` rows, of which each rank of the TP group has a slice."""
        if self.tp_mesh.size() == 1:
            return mine
        return redistribute(mine, self.tp_mesh, Shard(0), Replicate(), gradient=Replicate(), shape=torch.Size((count, mine.shape[1])))


def _row_dtype(experts: Module) -> torch.dtype:
    """The dtype of the weights, to which tokens are cast. Raises ValueError for one that no recipe multiplies."""
    dtype: torch.dtype = experts.down_proj.dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"{__name__}: weights of {type(experts).__name__} are {dtype}, want bfloat16 or float32; "
            "load the model with dtype=torch.bfloat16, and not quantised"
        )
    return dtype


@functools.cache
def _on_one_rank(*of_recipe: Any) -> Recipe:
    """A recipe with these fields, but without the rounding of an exchange: there is none on one rank."""
    recipe = Recipe(*of_recipe)
    return replace(recipe, name=f"{recipe.name}, on one rank", dispatch="hp", combine_backward="hp")


def _weight(experts: Module, name: str) -> Tensor:
    """(L, N, K), whichever way the model stores it."""
    weight: Tensor = getattr(experts, name)
    return weight.transpose(-2, -1) if experts.is_transposed else weight


def computes(experts: nn.Module) -> bool:
    """Whether experts of a model run by an experts implementation of this module, and by no exchange of transformers' own."""
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return all(hasattr(experts, form) for form in _FORM) and getattr(ExpertsInterface().get(name), "func", None) is experts_forward


def lora_factors(experts: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Adapters by the name of their weight, a (E, R, K) and b (E, N, R), which these experts apply as long as they are in the dict."""
    found: dict[str, tuple[Tensor, Tensor]] | None = getattr(experts, _FACTORS, None)
    if found is None:
        found = {}
        setattr(experts, _FACTORS, found)
    return found


def weight_names(experts: Module) -> tuple[str, str]:
    """The names of the weights of the gate and up GEMM and of the down GEMM."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _lora(experts: Module, dtype: torch.dtype) -> ExpertLora:
    factors = getattr(experts, _FACTORS, None) or {}  # a compiled graph notices when they are set
    pairs = (factors.get(name, (None, None)) for name in weight_names(experts))
    return ExpertLora(*(None if factor is None else factor.to(dtype) for pair in pairs for factor in pair))


def _parameters(experts: Module) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Weight (L, N, K) and bias (L, N) of the gate and up GEMM and of the down GEMM."""
    first, second = (
        (_weight(experts, name), getattr(experts, f"{name}_bias") if experts.has_bias else None) for name in weight_names(experts)
    )
    return first, second


def _products(experts: Module, rows: Tensor, counts: Tensor, recipe: Recipe, pad_groups: bool = False) -> Tensor:
    """Rows (P, D) in the experts' order, counts (L,) -> (P, D); rows after the last expert's add nothing to any gradient."""
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    (w1, b1), (w2, b2) = _parameters(experts)
    how, lora = activation_of(experts), _lora(experts, rows.dtype)
    if runs_fused(recipe) and how is not None:
        weights = ExpertWeights(w1, w2, None, b1, b2, layout=how.layout, lora=lora)
        out = expert_ffn(rows, weights, ends, recipe, swiglu=how.swiglu, activation=how.activation)
    else:

        def product(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None) -> Tensor:
            y = expert_mm(x, weight, ends, recipe, pad_groups=pad_groups, bias=bias)
            return y if a is None or b is None else y + expert_mm(expert_mm(x, a, ends, _HIGH_PRECISION), b, ends, _HIGH_PRECISION)

        between = experts._apply_gate if experts.has_gate else experts.act_fn
        out = product(between(product(rows, w1, b1, lora.a1, lora.b1)), w2, b2, lora.a2, lora.b2)
    return experts.post_expert_norm(out) if experts.has_post_expert_norm else out


def _activation_of_fused(experts: Module) -> ExpertActivation | None:
    """The activation of these experts; None if `fused_experts` cannot compute them."""
    return None if experts.has_post_expert_norm else activation_of(experts)


@dataclass
class Acceleration:
    """What `accelerate` did to a model.

    Attributes:
        converted: names of modules, and what each computes by now.
        left: names of modules, or "experts", "head", "norms", "rotary", "routers" for all of a kind, and why each stays as it was.

    Examples:
        >>> from mxep.integrations import transformers_5
        >>> print(transformers_5.Acceleration({"lm_head": "loss in chunks of tokens, hp"}, {"norms": "liger-kernel is not installed"}))
        converted: lm_head: loss in chunks of tokens, hp
        left: norms: liger-kernel is not installed
    """

    converted: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give the model back what it had before: its outputs are the same bits again. Its parameters keep the values that they have now.

        Raises:
            ValueError: something has wrapped a converted module since; see `mxep.unconvert`.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self.converted.clear()

    def __str__(self) -> str:
        """A line for each kind of module, layers of one name together."""
        lines = []
        for title, entries in (("converted", self.converted), ("left", self.left)):
            for what in dict.fromkeys(entries.values()):
                lines.append(f"{title}: {shown_names(name for name, value in entries.items() if value == what)}: {what}")
        return "\n".join(lines)


def accelerate(
    model: PreTrainedModel,
    recipe: str | Recipe | None = None,
    *,
    experts: bool = True,
    linears: str | Sequence[str] | None = "auto",
    head: bool = True,
    head_recipe: str | Recipe = "hp",
    norms: bool = True,
    rotary: bool = True,
    routers: bool = True,
) -> Acceleration:
    """Convert a loaded model of transformers for training, in place: experts, routers, dense linear layers, projection to the vocabulary,
    norms, rotary embeddings.

    Parameters, their names, `save_pretrained` and `generate` stay as they are.  Call it before the model is sharded, compiled, or given to
    a trainer or to peft.  What cannot be converted stays as it is, and the result says why; it is logged too.

    Args:
        model: with its weights, in bf16 or float32.
        recipe: of the experts' and linear layers' products; see `mxep.Recipe`.
        experts: compute the routed experts by the recipe, as after `register` and `set_experts_implementation`.  The name of the
            implementation is in the model's configuration: models that were made of the same object (and not of copies) switch together.
        linears: "auto": the dense linear layers that gain by their shape (`mxep.parallel.linear_gains`); or names as in
            `mxep.convert_linears`, for layers of any shape in whole MX blocks; None: none.
        head: in training with `labels=` (by name), compute the loss from one chunk of logits at a time (`mxep.linear_cross_entropy`).  Such
            an output has no `logits`; in eval mode and without labels nothing changes.
        head_recipe: of that loss's products (docs/numerics.md has the errors of MXFP8).
        norms: RMSNorms by liger-kernel, on a GPU and if it is installed; wide ones by torch's fused kernel.
        rotary: rotary embeddings of attention by liger-kernel, likewise.
        routers: routers of experts by two kernels, and their backward by one; each token's choices are in rising order then.

    Returns:
        what was converted, what was left and why; its `undo()` takes everything back.

    Raises:
        ValueError: something else than a transformers model, one that is converted already, an unknown recipe, names that match no linear
            layer, nothing that can be converted.

    Examples:
        >>> from mxep.integrations import transformers_5
        >>> # model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
        >>> # print(transformers_5.accelerate(model, "mxfp8_wgrad_with_mx"))
    """
    from transformers import PreTrainedModel  # not with this module: it imports every quantizer of transformers

    where, chosen, of_head = f"{__name__}.accelerate", resolve_recipe(recipe), resolve_recipe(head_recipe)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{where}: a {type(model).__name__}, want a transformers.PreTrainedModel; accelerate it before it is wrapped")
    if is_loss_converted(model) or any(map(_is_converted, model.modules())):
        raise ValueError(
            f"{where}: a model with converted modules, want one as it was loaded; call undo() of what the first call returned, "
            "mxep.unconvert after convert_experts or convert_linears, or load a copy's weights into a new model"
        )
    done = Acceleration()
    try:
        if experts:
            _accelerate_experts(model, chosen, done)
        if linears is not None:
            _accelerate_linears(model, chosen, linears, done)
        if head:
            _accelerate_head(model, of_head, done)
        if norms:
            _accelerate_norms(model, done)
        if rotary:
            _accelerate_rotary(model, done)
        if routers:
            _accelerate_routers(model, done)
    except Exception:
        done.undo()
        raise
    if not done.converted:
        raise ValueError(f"{where}: nothing of {type(model).__name__} can be converted\n{done}")
    _log.info("%s", done)
    return done


def _is_converted(module: nn.Module) -> bool:
    switched = replaced_by(module) is not None or _IMPLEMENTATION in vars(module)
    return switched or isinstance(module, MXLinear) or converted_recipe(module) is not None


def _undo_linears(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Restore linear layers, except for those that `mxep.unconvert` has restored already."""
    if left := [name for name in names if isinstance(model.get_submodule(name), MXLinear)]:
        unconvert(model, left)


def _accelerate_linears(model: PreTrainedModel, recipe: Recipe, names: str | Sequence[str], done: Acceleration) -> None:
    if names != "auto":
        converted = convert_linears(model, names, recipe)
    else:
        chosen: dict[str, nn.Linear] = {}
        for name, linear in model.named_modules(remove_duplicate=False):
            if type(linear) is not nn.Linear or linear is model.get_output_embeddings():
                continue
            if reason := why_linear_stays(name, linear, recipe):
                done.left[name] = f"linear, {reason}"
            else:
                chosen[name] = linear
        switch_linears(chosen, recipe)
        converted = list(chosen)
    if converted:
        done._undo.append(functools.partial(_undo_linears, model, converted))
        done.converted |= dict.fromkeys(converted, f"linear, {recipe.name}")


def _accelerate_experts(model: PreTrainedModel, recipe: Recipe, done: Acceleration) -> None:
    found = {name: module for name, module in model.named_modules() if all(hasattr(module, form) for form in _FORM)}
    reasons = [reason for module in found.values() if (reason := _why_experts_stay(module, recipe))]
    if not found or reasons:
        done.left["experts"] = reasons[0] if reasons else "the model has none that transformers can switch"
        return
    implementation = _Implementation(recipe)
    # `set_experts_implementation` leaves out models of a class in a user's own file, and experts with a configuration of their layer.
    for config in {id(module.config): module.config for module in found.values()}.values():
        done._undo.append(functools.partial(setattr, config, "_experts_implementation", config._experts_implementation))
        config._experts_implementation = implementation.name
    for module in found.values():
        setattr(module, _IMPLEMENTATION, implementation)
        done._undo.append(functools.partial(delattr, module, _IMPLEMENTATION))
    done.converted |= dict.fromkeys(found, f"experts, {recipe.name}")


class _Implementation:
    """The experts implementation of a recipe. Experts keep it, so that a process which reads them from a pickle knows it too."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.name = recipe, f"mxep_{recipe.name}"
        known = ExpertsInterface().get(self.name)
        if known is None:
            register(recipe, self.name)
        elif known.keywords["recipe"] != recipe:
            raise ValueError(f"{__name__}.accelerate: another recipe is called {recipe.name!r} already; give this one a name of its own")

    def __reduce__(self) -> tuple[type, tuple[Recipe]]:
        return _Implementation, (self.recipe,)


def _why_experts_stay(experts: Module, recipe: Recipe) -> str | None:
    try:
        _row_dtype(experts)
    except ValueError as error:
        return str(error)
    shapes = [tuple(to_local(weight).shape[-2:]) for weight, _ in _parameters(experts)]
    if recipe.gemm == "mxfp8" and any(width % MX_BLOCK for shape in shapes for width in shape):
        return f"their widths {shapes} are no multiples of {MX_BLOCK} (one MX block)"
    return None


def _accelerate_routers(model: PreTrainedModel, done: Acceleration) -> None:
    found = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Router")}
    for name, module in found.items():
        if "forward" in vars(module):
            done.left[name] = _OWN_FORWARD
        elif (form := router_form(module)) is None:
            done.left[name] = f"{type(module).__name__}, which routes in another way or dtype than our kernels"
        else:
            done._undo.append(convert_router(module, form))
            done.converted[name] = "router, two kernels"
    if not found:
        done.left["routers"] = "the model has none that is a module of its own"


def _accelerate_head(model: PreTrainedModel, recipe: Recipe, done: Acceleration) -> None:
    if reason := why_loss_stays(model, recipe):
        done.left["head"] = reason
        return
    done._undo.append(convert_loss(model, recipe))
    name = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    done.converted[name] = f"loss in chunks of tokens, {recipe.name}"


def _accelerate_norms(model: PreTrainedModel, done: Acceleration) -> None:
    if reason := why_modules_stay(model):
        done.left["norms"] = reason
        return
    for name, module in model.named_modules():
        if not type(module).__name__.endswith("RMSNorm"):
            continue
        if "forward" in vars(module):
            done.left[name] = _OWN_FORWARD
        elif (form := rms_norm_form(module)) is None:
            done.left[name] = f"{type(module).__name__}, which liger-kernel's RMSNorm does not compute"
        else:
            done._undo.append(convert_norm(module, form))
            done.converted[name] = f"RMSNorm, {norm_kernel(module, form)}"


def _accelerate_rotary(model: PreTrainedModel, done: Acceleration) -> None:
    if reason := why_modules_stay(model):
        done.left["rotary"] = reason
        return
    widths = {2 * buffer.numel() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    before = len(done.converted)
    for name, module in model.named_modules():
        if "forward" in vars(module) or rotary_form(module) is None:
            continue
        if getattr(module, "qk_rope_head_dim", getattr(module, "head_dim", None)) in widths:
            done._undo.append(convert_rotary(module))
            done.converted[name] = "rotary embedding, liger-kernel"
        else:
            done.left[name] = "rotary embedding, of a part of each head"
    if len(done.converted) == before:
        done.left["rotary"] = "the model has none that liger-kernel computes"

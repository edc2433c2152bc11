"""The projection to the vocabulary and the loss of a causal language model of transformers, one chunk of tokens at a time.

A model's forward projects the hidden states of all tokens to logits, and passes these to its loss function.  After `convert_loss`, while
the model trains and gets labels, its projection (`lm_head`) returns the loss, and its loss function returns what it gets; the output has
no logits.  All other calls run as before: without labels (generation), in eval mode, with `logits_to_keep`.

    forward(labels)   notes the labels, each the next token, where `lm_head` finds them
    lm_head(hidden)   (B, S, D) -> () their loss by `mxep.linear_cross_entropy`; FSDP has gathered its weight here
    loss_function     () -> (), after a check that the model's forward did not change it on the way
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.models.loss import IGNORE, linear_cross_entropy
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")  # of configs whose models change their logits


class _Targets(NamedTuple):
    labels: Tensor  # (B * S,) int64, of the next token, or IGNORE
    num_items: Tensor | int | None  # of all microbatches and ranks, by which transformers divides the sum; None: the mean is asked for
    shift_labels: Tensor | None  # as the call gave them


class LossState:
    """State that the three replaced functions of a model share while its forward runs; empty between calls."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.targets: _Targets | None = None
        self.loss: Tensor | None = None


def why_loss_stays(model: PreTrainedModel, recipe: Recipe) -> str | None:
    """Why `convert_loss` cannot take a model; None if it can."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scaled = [name for name in _SCALES if getattr(config, name, None) is not None]  # 1 too: the product is another tensor
    if head is None:
        return "the model has no projection to a vocabulary"
    if type(head) is not nn.Linear or head.bias is not None:
        return (
            f"it is a {type(head).__name__}{' with a bias' * (getattr(head, 'bias', None) is not None)}, want a torch.nn.Linear without one"
        )
    if "forward" in vars(head) or "forward" in vars(model):
        return "a forward of its own replaces that of the model's class or of its projection (a hook, an offload)"
    if model.loss_function is not ForCausalLMLoss:
        return f"the model's loss is {getattr(model.loss_function, '__name__', model.loss_function)}, want transformers' ForCausalLMLoss"
    if any(getattr(c, "is_encoder_decoder", False) for c in (model.config, config)):
        return "the model is an encoder with a decoder, whose labels are those of its tokens and not the next ones"
    if scaled:
        return f"the model changes its logits before the loss ({scaled[0]}={getattr(config, scaled[0])})"
    if isinstance(head.weight, DTensor):
        return "its weight is split over ranks"
    if head.weight.dtype not in (torch.bfloat16, torch.float32):
        return f"its weight is {head.weight.dtype}, want bfloat16 or float32"
    if recipe.gemm == "mxfp8" and head.in_features % MX_BLOCK:
        return f"its width {head.in_features} is no multiple of {MX_BLOCK} (one MX block)"
    return None


def convert_loss(model: PreTrainedModel, recipe: Recipe) -> Callable[[], None]:
    """Convert a model for which `why_loss_stays` has no reason; returns what undoes it."""
    head, state, own = model.get_output_embeddings(), LossState(recipe), vars(model).get("_loss_function")
    forward = functools.partial(_model_forward, model, state)
    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]  # Trainer looks for the names of arguments
    model.loss_function = functools.partial(_loss_function, state, model.loss_function)
    model.forward = forward  # type: ignore[method-assign]
    head.forward = functools.partial(_head_forward, head, state)

    def undo() -> None:
        del model.forward, head.forward
        if _has_converted_loss(model):  # else it is one that was set since
            del model._loss_function
            if own is not None:
                model.loss_function = own

    return undo


def is_loss_converted(model: PreTrainedModel) -> bool:
    """Whether `convert_loss` has converted the model, or the one which it is a copy of."""
    return getattr(vars(model).get("forward"), "func", None) is _model_forward or _has_converted_loss(model)


def _has_converted_loss(model: PreTrainedModel) -> bool:
    """Whether the model's loss function is that of `convert_loss`, and no other has been set since."""
    return getattr(getattr(model, "_loss_function", None), "func", None) is _loss_function


def _model_forward(model: PreTrainedModel, state: LossState, *args: Any, **kwargs: Any) -> Any:
    forward = type(model).forward
    labels, kept = kwargs.get("labels"), kwargs.get("logits_to_keep", 0)
    if not model.training or labels is None or not isinstance(kept, int) or kept != 0 or not _has_converted_loss(model):
        return forward(model, *args, **kwargs)
    if torch.is_autocast_enabled(labels.device.type) and torch.get_autocast_dtype(labels.device.type) == torch.float16:
        raise ValueError(
            f"transformers_5.accelerate: {type(model).__name__} under autocast to float16, want torch.bfloat16 (bf16=True of a Trainer); "
            "or undo the conversion, and accelerate(..., head=False, linears=None)"
        )
    state.targets = _Targets(_next_tokens(labels, kwargs), kwargs.get("num_items_in_batch"), kwargs.get("shift_labels"))
    try:
        output = forward(model, *args, **kwargs)
        made = state.loss
    except (IndexError, TypeError) as error:
        if state.loss is None:
            raise
        raise ValueError(
            f"transformers_5.accelerate: {type(model).__name__} reads its logits before its loss ({error}), want it to hand them on; undo "
            "the conversion, and accelerate(..., head=False)"
        ) from error
    finally:
        state.targets = state.loss = None
    if isinstance(output, tuple):
        return tuple(None if item is made else item for item in output)
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


def _next_tokens(labels: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """(B * S,): each token's label, which is the next token, as transformers' ForCausalLMLoss shifts them."""
    ignore, shifted = kwargs.get("ignore_index", IGNORE), kwargs.get("shift_labels")
    if shifted is None:
        shifted = F.pad(labels, (0, 1), value=ignore)[..., 1:]
    shifted = shifted.reshape(-1)
    return shifted if ignore == IGNORE else shifted.masked_fill(shifted == ignore, IGNORE)


def _head_forward(head: nn.Linear, state: LossState, input: Tensor) -> Tensor:
    """input (B, S, D) -> logits (B, S, V), or () the loss of the labels that the model's forward noted."""
    if state.targets is None:
        return type(head).forward(head, input)
    labels, num_items, _ = state.targets
    hidden, weight = input.flatten(0, -2), head.weight
    if torch.is_autocast_enabled(hidden.device.type):  # as torch.nn.functional.linear
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    loss = linear_cross_entropy(
        hidden, weight, labels.to(hidden.device), recipe=state.recipe, reduction="mean" if num_items is None else "sum"
    )
    if num_items is not None:
        loss = loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)
    state.loss = loss
    return loss


def _loss_function(state: LossState, original: Callable[..., Tensor], logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if state.targets is None:
        return original(logits, labels, *args, **kwargs)
    loss = state.loss
    if logits is not loss and (loss is None or logits.dim() or logits.data_ptr() != loss.data_ptr()):  # a backward hook makes a view
        raise ValueError(
            "transformers_5.accelerate: the model or a hook changes its logits between its projection and its loss, or it has another "
            "projection now, want the projection that was converted and its output as it is; undo the conversion, and "
            "accelerate(..., head=False)"
        )
    state.loss = logits
    if kwargs.get("shift_labels") is not state.targets.shift_labels:
        raise ValueError(
            "transformers_5.accelerate: the model hands other shift_labels to its loss than it was given, want it to shift its labels; "
            "undo the conversion, and accelerate(..., head=False)"
        )
    return logits.clone()  # another tensor than the placeholder of the logits

"""Tensor parallelism of a decoder: heads of attention, hidden columns of dense and shared FFN; routed experts stay whole."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from mxep.models.decoder import Decoder, DecoderLayer
from mxep.parallel import ColumnShards, GatheredRegion, RowShards, SlicedSequence


def apply_tensor_parallel(model: Decoder, tp_mesh: DeviceMesh) -> None:
    """Shard a model or a pipeline stage over a TP group, in place; before FSDP, before or after `apply_mxfp8_expert_parallel`.

    Outside of attention and FFN, a rank has a shard of each sequence: every rank takes the whole tokens (B, S), hidden states are
    (B, S/tp, D), and the caller shards labels in the same way (`mxep.parallel.slice_sequence`).

    Raises:
        ValueError: heads or hidden widths that the TP degree does not divide.
    """
    if tp_mesh.size() == 1:
        return
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        parallelize_module(layer.attention, tp_mesh, _attention_plan(model, layer))
        ffn, dim = (layer.moe.shared_experts, 0) if layer.moe_enabled else (layer.feed_forward, 1)
        if ffn is not None:
            plan = {"": GatheredRegion(dim), "w1": ColumnShards(), "w3": ColumnShards(), "w2": RowShards()}
            parallelize_module(ffn, tp_mesh, plan)
    if model.tok_embeddings is not None:
        parallelize_module(model.tok_embeddings, tp_mesh, SlicedSequence(1))


def _attention_plan(model: Decoder, layer: DecoderLayer) -> dict[str, ParallelStyle]:
    """Each rank gets whole heads; projections to a latent are replicated."""
    heads = model.config.num_heads
    key_heads = getattr(model.config, "num_kv_heads", heads)
    plan: dict[str, ParallelStyle] = {"": GatheredRegion(1), "wo": RowShards(unit=layer.attention.wo.in_features // heads)}
    for name, count in {"wq": heads, "wq_b": heads, "wkv_b": heads, "wk": key_heads, "wv": key_heads}.items():
        if hasattr(layer.attention, name):
            plan[name] = ColumnShards(unit=getattr(layer.attention, name).out_features // count)
    return plan

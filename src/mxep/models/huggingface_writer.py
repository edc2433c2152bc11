"""Writes Hugging Face folders of safetensors, tensor by tensor: bf16 or float32, or MXFP8 in the layout of compressed-tensors.

In MXFP8 the linear layers of attention, experts and dense FFNs hold their weight (N, K) as `weight`, float8_e4m3fn, and `weight_scale`
(N, K/32), uint8 e8m0 bytes.  Embedding, output, routers and norms stay plain.  config.json's quantization_config names the format
"mxfp8-quantized" of compressed-tensors, which vLLM and SGLang load.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mxep.models.families import build_model
from mxep.models.huggingface import (
    CONFIG_JSON,
    GENERATION_JSON,
    MORE_TEMPLATES,
    MXFP8,
    MXFP8_QUANTIZED,
    is_optional,
    is_stacked,
    published_config,
    published_names,
)
from mxep.models.huggingface_files import INDEX, SINGLE, PublishedFiles, check_names, holds_nan
from mxep.models.huggingface_shape import read_shape
from mxep.models.presets import ModelConfig
from mxep.mx import MXTensor, quantize_mx
from mxep.private_folders import scratch_folder
from mxep.recipe import resolve_recipe
from mxep.shapes import MX_BLOCK

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FILE_BYTES = 5 * 10**9
_LINEAR = re.compile(r"\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$")
_EXPERT_BIAS = "e_score_correction_bias"  # stays float32
_COPIED = {".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"}  # of a folder that is converted: tokenizer, generation, code
_NOT_COPIED = {CONFIG_JSON, INDEX, "hf_quant_config.json"}

Report = Callable[[str], None]


def in_mxfp8(name: str, shape: tuple[int, ...]) -> bool:
    """Whether an MXFP8 folder holds the tensor of that published name in MXFP8: linear layers whose input width is a multiple of 32.

    >>> in_mxfp8("model.layers.3.mlp.experts.7.down_proj.weight", (2048, 768)), in_mxfp8("lm_head.weight", (151936, 2048))
    (True, False)
    """
    return _LINEAR.search(name) is not None and len(shape) == 2 and shape[1] % MX_BLOCK == 0


def quantization_config(plain: list[str]) -> dict[str, Any]:
    """What config.json says of an MXFP8 folder.

    Args:
        plain: names of the linear layers that are not in MXFP8.
    """
    group = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": MX_BLOCK, "symmetric": True}
    group |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    scheme = {"weights": {**group, "dynamic": False}, "input_activations": {**group, "dynamic": True}, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": MXFP8_QUANTIZED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "format": MXFP8_QUANTIZED, **scheme}},
        "ignore": sorted(plain),
        "kv_cache_scheme": None,
    }


class WeightFiles:
    """Numbered safetensors files and their index; the tensors of one file are in memory.

    Attributes:
        plain: names of the modules whose matrices were written plainly.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES, report: Report = lambda text: None) -> None:
        """`folder` exists. A file is closed when it has reached `file_bytes`. `report` takes a progress message after each tensor."""
        self.folder, self.file_bytes, self.report = folder, file_bytes, report
        self.plain: list[str] = []
        self._waiting: dict[str, Tensor] = {}
        self._file_of: dict[str, int] = {}
        self._files = self._pending = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor under its published name; an MXTensor as values and scales.

        Raises:
            ValueError: an MXTensor with NaN.
        """
        parts = {name: tensor}
        if isinstance(tensor, MXTensor):
            if holds_nan(tensor):
                raise ValueError(f"{name} has values that are no finite numbers, which MXFP8 files do not hold; take an earlier checkpoint")
            parts = {name + MXFP8.values: tensor.qdata, name + MXFP8.scales: tensor.scale.view(torch.uint8)}
        elif tensor.ndim == 2 and name.endswith(".weight"):
            self.plain.append(name.removesuffix(".weight"))
        for other, part in parts.items():
            self._waiting[other] = part.detach().to("cpu", copy=True).contiguous()
            self._file_of[other] = self._files + 1
            self._pending += part.nbytes
            self._total += part.nbytes
        self.report(f"wrote {len(self._file_of)} tensors, {self._total / 2**30:,.1f} GiB")
        if self._pending >= self.file_bytes:
            self._close()

    def _close(self) -> None:
        self._files, self._pending = self._files + 1, 0
        save_file(self._waiting, self.folder / f"{self._files:05d}.safetensors", metadata={"format": "pt"})
        self._waiting.clear()

    def finish(self) -> None:
        """Write what is left, rename the files, now that their number is known, and write the index if there are several."""
        if self._waiting:
            self._close()
        if self._files == 1:
            (self.folder / "00001.safetensors").rename(self.folder / SINGLE)
            return
        final = {number: f"model-{number:05d}-of-{self._files:05d}.safetensors" for number in range(1, self._files + 1)}
        for number, name in final.items():
            (self.folder / f"{number:05d}.safetensors").rename(self.folder / name)
        weight_map = {name: final[number] for name, number in sorted(self._file_of.items())}
        (self.folder / INDEX).write_text(json.dumps({"metadata": {"total_size": self._total}, "weight_map": weight_map}, indent=1) + "\n")


def save_published(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = FILE_BYTES,
    drop_expert_bias: bool = False,
    token_ids: Mapping[str, int | None] = MappingProxyType({}),
    stop_ids: Sequence[int] = (),
    files: Mapping[str, bytes] = MappingProxyType({}),
    *,
    mxfp8: bool = False,
    report: Report = lambda text: None,
) -> list[str]:
    """Write a Hugging Face folder, which appears when it is complete; returns lines about what it lacks.

    Args:
        config: the model's shape, written as config.json.
        tensors: (our name, whole tensor on any device), consumed one by one.
        folder: must not exist yet.
        dtype: of the weights; the experts' bias stays float32.
        file_bytes: a file is closed when it has reached this size.
        drop_expert_bias: drop a non-zero expert bias if the family has none (all but DeepSeek-V3).
        token_ids: bos_token_id, eos_token_id and pad_token_id of config.json. With an eos_token_id there is a generation_config.json too.
        stop_ids: further tokens that end an answer, in generation_config.json.
        files: content of further files by name: the tokenizer's.
        mxfp8: write linear layers (`in_mxfp8`) in MXFP8, quantised (RCEIL) from values that are rounded to `dtype`.
        report: takes a progress message after each tensor.

    Raises:
        ValueError: `folder` exists, no published family has this shape, the family lacks a trained tensor, a tensor is missing, or one in
            MXFP8 is not finite.
    """
    ids = {name: token_ids.get(name) for name in TOKEN_IDS}  # null is written too, since transformers' classes have other defaults
    generation: dict[str, Any] = {**ids, "pad_token_id": ids["eos_token_id"] if ids["pad_token_id"] is None else ids["pad_token_id"]}
    if stop_ids:
        generation["eos_token_id"] = [ids["eos_token_id"], *stop_ids]
    if ids["pad_token_id"] == ids["eos_token_id"]:
        ids["pad_token_id"] = None  # transformers does not train the embedding of pad_token_id
    described = {**published_config(config), **ids}
    with _new_folder(folder) as partial:
        weights = WeightFiles(partial, file_bytes, report)
        notes = _add_model(weights, config, tensors, dtype, mxfp8, drop_expert_bias)
        weights.finish()
        _write_config(partial, described, dtype, weights.plain if mxfp8 else None)
        if ids["eos_token_id"] is not None:
            _write_json(partial / GENERATION_JSON, generation)
        for name, data in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(data)
    return notes


def convert_published(
    source: Path,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = FILE_BYTES,
    *,
    mxfp8: bool = False,
    report: Report = lambda text: None,
) -> None:
    """Write a published folder of one of the families again, in another format.

    Tensors are read one by one, in the order of the files, those of multi-token prediction too. Tokenizer, generation settings and code are
    copied. config.json keeps all but dtype and quantization_config.

    Args:
        source: in bf16 or float32, FP8 with block scales, or MXFP8.
        folder: must not exist yet.
        dtype: of the weights; the experts' bias stays float32.
        file_bytes: a file is closed when it has reached this size.
        mxfp8: write linear layers (`in_mxfp8`) in MXFP8: the bytes of `mxep.models.huggingface_files.PublishedFiles.read_mx`.
        report: takes a progress message after each tensor.

    Raises:
        ValueError: `folder` exists, another architecture, missing or unknown tensors, tensors of other shapes, damaged files.
    """
    shape, _ = read_shape(source)
    files = PublishedFiles(source)
    check_names(files, shape)
    wanted = _published_shapes(shape)
    for name in files.names:
        if name in wanted:  # else of multi-token prediction
            files.check_shape(name, wanted[name])
    described = {key: value for key, value in files.described.items() if key != "quantization_config"}
    with _new_folder(folder) as partial:
        weights = WeightFiles(partial, file_bytes, report)
        for name in files.names:
            if mxfp8 and in_mxfp8(name, files.shape(name)):
                weights.add(name, files.read_mx(name, dtype=dtype))
            else:
                weights.add(name, files.read(name).to(torch.float32 if name.endswith(_EXPERT_BIAS) else dtype))
        weights.finish()
        _write_config(partial, described, dtype, weights.plain if mxfp8 else None)
        for path in sorted([*source.iterdir(), *source.glob(MORE_TEMPLATES)]):
            if path.suffix in _COPIED and path.name not in _NOT_COPIED and path.is_file():
                target = partial / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def _published_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by its published name."""
    with torch.device("meta"):
        model = build_model(config, resolve_recipe("hp"))
    names = published_names(config)
    return {other: tuple(tensor.shape)[is_stacked(name) :] for name, tensor in model.state_dict().items() for other in names[name]}


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that is filled under another name, of this call alone, and gets its own at the end; removed if that fails."""
    if os.path.lexists(folder):  # a link that leads nowhere too: no folder can take its name
        raise ValueError(f"{folder} exists already, want the name of a new folder")
    if not folder.parent.exists():  # else it may be a file, which the next line reports
        folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder("folder", folder.parent) as scratch:
        partial = scratch / "partial"
        partial.mkdir()
        yield partial
        os.replace(partial, folder)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _write_config(folder: Path, described: dict[str, Any], dtype: torch.dtype, plain: list[str] | None) -> None:
    """config.json; `plain` are the linear layers of an MXFP8 folder that stay plain, None if it is none."""
    name = "dtype" if "dtype" in described else "torch_dtype"  # as later versions of transformers write it
    quantised = {} if plain is None else {"quantization_config": quantization_config(plain)}
    _write_json(folder / CONFIG_JSON, {**described, name: str(dtype).removeprefix("torch."), **quantised})


def _add_model(
    weights: WeightFiles,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    mxfp8: bool,
    drop_expert_bias: bool,
) -> list[str]:
    """Write the tensors under their published names; returns the lines of `save_published`."""
    names, dropped = published_names(config), list[float]()  # the largest value of each dropped bias
    (architecture,) = published_config(config)["architectures"]
    for name, tensor in tensors:
        if name not in names:
            raise ValueError(f"save_published: {name} is no tensor of {architecture}, or was given twice")
        if is_optional(name, config):
            if largest := float(tensor.abs().max()):
                dropped.append(largest)
                if not drop_expert_bias:
                    raise ValueError(
                        f"save_published: {name} is not zero (up to {largest:.3g}), and {architecture} chooses experts without a bias: the "
                        "folder would be another model than the one that was trained; drop_expert_bias, in `mxep convert` "
                        "--drop-expert-bias, writes it without"
                    )
            continue
        pieces = tensor.unbind(0) if is_stacked(name) else (tensor,)
        for other, piece in zip(names.pop(name), pieces, strict=True):
            kept = piece.detach().to(torch.float32 if other.endswith(_EXPERT_BIAS) else dtype)
            weights.add(other, quantize_mx(kept.contiguous()) if mxfp8 and in_mxfp8(other, tuple(piece.shape)) else kept)
    if missing := [name for name in names if not is_optional(name, config)]:
        raise ValueError(f"save_published: {len(missing)} tensors were not given, {missing[0]} first")
    lost = f"the experts' biases of {len(dropped)} layers (up to {max(dropped, default=0):.3g}) are left out: tokens choose other experts"
    return [f"{lost} than in the run, and the loss is another one"] if dropped else []

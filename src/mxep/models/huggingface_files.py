"""Reads and writes Hugging Face folders of safetensors, tensor by tensor. A rank never holds more than its shard and one file's tensors.

A model that is read into may be sharded already: each rank reads only its slices and its experts.  Names, layouts and config.json are those
of `mxep.models.huggingface`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mxep.json_files import read_json_object, typed
from mxep.models.decoder import Decoder
from mxep.models.huggingface import (
    CONFIG_JSON,
    halves_to_pairs,
    is_optional,
    published_config,
    published_names,
    read_published_config,
    rotated_rows,
)
from mxep.models.huggingface_shape import check_published_config
from mxep.models.presets import ModelConfig
from mxep.moe.init import local_shard

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION_JSON = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FILE_BYTES = 5 * 10**9
_FP8_BLOCK = 128  # rows and columns that share one scale in DeepSeek's FP8 files
_PLAIN = {"F64", "F32", "BF16", "F16"}

Region = tuple[slice, ...]


class PublishedFiles:
    """The tensors of a folder by name. A file is opened when its first tensor is read.

    Raises:
        ValueError: no safetensors files, a damaged index, or an index that names a missing file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        if (folder / INDEX).exists():
            self.file_of = self._read_index(folder / INDEX)
        elif (folder / SINGLE).exists():
            self.file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise ValueError(f"{folder} holds neither {INDEX} nor {SINGLE}; want a folder with a model from the Hugging Face hub")

    @staticmethod
    def _read_index(path: Path) -> dict[str, str]:
        file_of = typed(read_json_object(path, "model").get("weight_map"), dict, f"{path}: weight_map")
        for name, file in file_of.items():
            where = f"{path}: weight_map[{name[:200]!r}]"
            if typed(file, str, where) != Path(file).name or file in ("", "..") or "\0" in file:  # no path out of the folder
                raise ValueError(f"{where} is {file[:200]!r}, want the name of a file in this folder; download the folder again")
        missing = sorted(file for file in set(file_of.values()) if not (path.parent / file).is_file())
        if missing:
            raise ValueError(f"{path} names {len(missing)} files that are not there, {missing[0]} first; download the folder again")
        return file_of

    def _file(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.folder / file} is damaged or no safetensors file: {error}") from error
        return self._open[file]

    def _slice(self, name: str) -> Any:
        file = self.file_of[name]
        try:
            return self._file(file).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self.folder / file} lacks {name}, which the index places there: {error}") from error

    def read(self, name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        """A region of one tensor, whose whole shape must be `shape`; FP8 with a scale for each 128x128 block is returned as float32.

        Raises:
            ValueError: another shape, or a dtype that is not supported.
        """
        part = self._slice(name)
        found, dtype = tuple(part.get_shape()), part.get_dtype()
        if found != shape:
            raise ValueError(f"{self.folder / self.file_of[name]}: {name} is {found}, want {shape}; choose the --model that it is")
        if dtype in _PLAIN:
            return part[region]
        scale = f"{name}_scale_inv"
        if dtype != "F8_E4M3" or scale not in self.file_of or len(region) != 2:
            raise ValueError(
                f"{self.folder / self.file_of[name]}: {name} is {dtype}, want one of {', '.join(sorted(_PLAIN))}, or F8_E4M3 with {scale}"
            )
        factors, wanted = self._slice(scale), tuple(-(-length // _FP8_BLOCK) for length in shape)
        if tuple(factors.get_shape()) != wanted:
            raise ValueError(
                f"{self.folder / self.file_of[scale]}: {scale} is {tuple(factors.get_shape())}, want {wanted}, one for 128x128"
            )
        rows, columns = (torch.arange(span.start, span.stop) // _FP8_BLOCK for span in region)
        return part[region].float() * factors[:].float()[rows][:, columns]


def load_published(model: Decoder, folder: Path, any_yarn: bool = False) -> list[str]:
    """Fill a model's weights in place from a Hugging Face folder; returns lines for the user.

    Args:
        model: on its device, sharded or not; of the same shape as the folder's config.json.
        folder: config.json and safetensors files, as published.
        any_yarn: allow a model whose YaRN differs from the folder's rope_scaling.

    Raises:
        ValueError: another model, missing or unknown tensors, damaged files.
    """
    config = model.config
    assert isinstance(config, ModelConfig)
    notes = check_published_config(config, folder, any_yarn)
    files, names = PublishedFiles(folder), published_names(config)
    notes += _check_names(files, names, config)
    halves = read_published_config(folder).get("rope_interleave") is False
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if names[name][0] not in files.file_of:
                tensor.zero_()  # optional: the expert bias, which the family does not have
                continue
            local, region = local_shard(tensor)
            rotated = rotated_rows(name, config) if halves else None
            shape = tuple(tensor.shape)
            if len(names[name]) > 1:
                for index, expert in enumerate(range(region[0].start, region[0].stop)):
                    local[index].copy_(files.read(names[name][expert], shape[1:], region[1:]))
            elif rotated is not None:
                whole = files.read(names[name][0], shape, tuple(slice(0, length) for length in shape))
                local.copy_(whole[halves_to_pairs(*rotated)][region])
            else:
                local.copy_(files.read(names[name][0], shape, region))
    return notes


def _check_names(files: PublishedFiles, names: dict[str, list[str]], config: ModelConfig) -> list[str]:
    """Raise ValueError for missing or unknown tensors. Layers past the last (multi-token prediction) and FP8 scales are allowed."""
    wanted = {other for others in names.values() for other in others}
    missing = [other for name, others in names.items() if not is_optional(name, config) for other in others if other not in files.file_of]
    if missing:
        raise ValueError(f"{files.folder}: {len(missing)} tensors are missing, {missing[0]} first; choose the --model that it is")
    extra = [name for name in files.file_of if name not in wanted and name.removesuffix("_scale_inv") not in wanted]
    unused = [name for name in extra if _layer_of(name) >= config.num_layers]
    if foreign := [name for name in extra if name not in unused and not name.endswith("rotary_emb.inv_freq")]:
        raise ValueError(f"{files.folder}: {len(foreign)} tensors are not in this model, {foreign[0]} first; choose the --model that it is")
    return [f"{files.folder}: {len(unused)} tensors of layers past the last (multi-token prediction) are not used"] if unused else []


def _layer_of(name: str) -> int:
    """The layer number in a published name; -1 if there is none."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdigit() else -1


def save_published(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = FILE_BYTES,
    drop_expert_bias: bool = False,
    token_ids: Mapping[str, int | None] = MappingProxyType({}),
    files: Mapping[str, bytes] = MappingProxyType({}),
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
        files: content of further files by name: the tokenizer's.

    Raises:
        ValueError: `folder` exists, no published family has this shape, the family lacks a trained tensor, or a tensor is missing.
    """
    ids = {name: token_ids.get(name) for name in TOKEN_IDS}  # null is written too, since transformers' classes have other defaults
    generation = {**ids, "pad_token_id": ids["eos_token_id"] if ids["pad_token_id"] is None else ids["pad_token_id"]}
    if ids["pad_token_id"] == ids["eos_token_id"]:
        ids["pad_token_id"] = None  # transformers does not train the embedding of pad_token_id
    described = {**published_config(config), "torch_dtype": str(dtype).removeprefix("torch."), **ids}
    content = {CONFIG_JSON: described} | ({} if ids["eos_token_id"] is None else {GENERATION_JSON: generation})
    if folder.exists():
        raise ValueError(f"{folder} exists already, want the name of a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        notes = _write_files(config, tensors, partial, dtype, file_bytes, drop_expert_bias)
        for name, values in content.items():
            (partial / name).write_text(json.dumps(values, indent=2) + "\n")
        for name, data in files.items():
            (partial / name).write_bytes(data)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return notes


def _write_files(
    config: ModelConfig, tensors: Iterable[tuple[str, Tensor]], partial: Path, dtype: torch.dtype, file_bytes: int, drop_expert_bias: bool
) -> list[str]:
    """Write the weight files and their index; returns the lines of `save_published`."""
    names, dropped = published_names(config), list[float]()  # the largest value of each dropped bias
    (architecture,) = published_config(config)["architectures"]
    file_of: dict[str, int] = {}
    waiting: dict[str, Tensor] = {}
    total = files = pending = 0

    def close() -> None:
        nonlocal files, pending
        files, pending = files + 1, 0
        save_file(waiting, partial / f"{files:05d}.safetensors", metadata={"format": "pt"})
        waiting.clear()

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
        kept = torch.float32 if name.endswith("expert_bias") else dtype
        pieces = tensor.unbind(0) if len(names[name]) > 1 else (tensor,)
        for other, piece in zip(names.pop(name), pieces, strict=True):
            waiting[other] = piece.detach().to("cpu", kept, copy=True).contiguous()
            file_of[other] = files + 1
            total += waiting[other].nbytes
            pending += waiting[other].nbytes
            if pending >= file_bytes:
                close()
    if missing := [name for name in names if not is_optional(name, config)]:
        raise ValueError(f"save_published: {len(missing)} tensors were not given, {missing[0]} first")
    if waiting:
        close()
    _name_files(partial, files, file_of, total)
    lost = f"the experts' biases of {len(dropped)} layers (up to {max(dropped, default=0):.3g}) are left out: tokens choose other experts"
    return [f"{lost} than in the run, and the loss is another one"] if dropped else []


def _name_files(partial: Path, files: int, file_of: dict[str, int], total: int) -> None:
    """Rename the files, now that their number is known, and write the index if there are several."""
    if files == 1:
        (partial / "00001.safetensors").rename(partial / SINGLE)
        return
    final = {number: f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)}
    for number, name in final.items():
        (partial / f"{number:05d}.safetensors").rename(partial / name)
    weight_map = {name: final[number] for name, number in sorted(file_of.items())}
    (partial / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n")

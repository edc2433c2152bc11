"""Reads Hugging Face folders of safetensors by slices, in the order of the files: bf16 or float32, FP8 with block scales, MXFP4, MXFP8.

A model that is read into may be sharded already: each rank reads only its slices and its experts.  Names, layouts and config.json are those
of `mxep.models.huggingface`.  `read_tensors` reads a folder of any architecture, tensor by tensor, as values or as MXFP8.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mxep.json_files import MAX_BYTES, read_json_object, typed
from mxep.models.decoder import Decoder
from mxep.models.huggingface import (
    CONFIG_JSON,
    FP8,
    MXFP4,
    MXFP8,
    PLAIN,
    StoredFormat,
    halves_to_pairs,
    is_optional,
    is_stacked,
    published_names,
    read_published_config,
    rotated_rows,
    stored_format,
)
from mxep.models.huggingface_shape import check_published_config
from mxep.models.presets import ModelConfig
from mxep.moe.init import local_shard
from mxep.mx import MXTensor, mxfp4_to_mxfp8, quantize_mx
from mxep.ops.quantize.reference import E4M3_NAN, E8M0_NAN
from mxep.shapes import MX_BLOCK, cdiv

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_OPEN = 2  # files at a time: what has been read of a mapped file stays in this process's memory until it is closed
_VALUE_DTYPES = {"plain": ("BF16", "F16", "F32", "F64"), "fp8": ("F8_E4M3",), "mxfp4": ("U8",), "mxfp8": ("F8_E4M3",)}
_SCALE_DTYPES = {"fp8": ("F32", "BF16", "F16", "F8_E8M0"), "mxfp4": ("U8", "F8_E8M0"), "mxfp8": ("U8", "F8_E8M0")}

Region = tuple[Any, ...]  # slices; an index where a dimension is dropped
Device = str | torch.device


def holds_nan(value: MXTensor) -> bool:
    """Whether a block or a value of it is NaN; a host sync on a GPU."""
    return bool((value.scale.view(torch.uint8) == E8M0_NAN).any() | ((value.qdata.view(torch.uint8) & E4M3_NAN) == E4M3_NAN).any())


class PublishedFiles:
    """The tensors of a folder by name. Values and scales of a quantised tensor are one tensor here.

    Of MXFP4 the name is the one before `_blocks` and `_scales`, and the shape is that of the values: (E, N, K) for gpt-oss' experts,
    where transformers' parameter is (E, K, N).  Rows of its gate_up_proj alternate between gate and up.

    Attributes:
        folder: of config.json and the safetensors files.
        described: the content of config.json.
        names: every tensor's name, in the order of the files -> how it is stored.

    Raises:
        ValueError: no config.json or safetensors files, a format that is not supported, a damaged index or file, a tensor that is missing
            from its file, values without scales or scales without values.

    Examples:
        >>> import pathlib, tempfile, safetensors.torch
        >>> from mxep.models.huggingface_files import PublishedFiles
        >>> temporary = tempfile.TemporaryDirectory()
        >>> _ = pathlib.Path(temporary.name, "config.json").write_text("{}")
        >>> safetensors.torch.save_file({"up.weight": torch.ones(4, 64)}, f"{temporary.name}/model.safetensors")
        >>> PublishedFiles(pathlib.Path(temporary.name)).read_mx("up.weight", (slice(1, 2), slice(0, 32)))
        MXTensor(shape=(1, 32), dtype=torch.bfloat16, device=cpu)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.described = read_published_config(folder)
        self._format = stored_format(self.described, folder / CONFIG_JSON)
        if (folder / SINGLE).exists():  # before an index, which an earlier save may have left, as transformers does
            self._file_of = dict.fromkeys(self._file(SINGLE).offset_keys(), SINGLE)
        elif (folder / INDEX).exists():
            self._file_of = self._read_index(folder / INDEX)
        else:
            raise ValueError(f"{folder} holds neither {INDEX} nor {SINGLE}; want a folder with a model from the Hugging Face hub")
        self.names = self._pair()

    def _read_index(self, path: Path) -> dict[str, str]:
        """The file of every stored tensor, in the order of the files."""
        file_of = typed(read_json_object(path, "model").get("weight_map"), dict, f"{path}: weight_map")
        for name, file in file_of.items():
            where = f"{path}: weight_map[{name[:200]!r}]"
            if typed(file, str, where) != Path(file).name or file in ("", "..") or "\0" in file:  # no path out of the folder
                raise ValueError(f"{where} is {file[:200]!r}, want the name of a file in this folder; download the folder again")
        files = sorted(set(file_of.values()))
        if missing := [file for file in files if not (path.parent / file).is_file()]:
            raise ValueError(f"{path} names {len(missing)} files that are not there, {missing[0]} first; download the folder again")
        found = {name: file for file in files for name in self._file(file).offset_keys() if file_of.get(name) == file}
        if name := next((name for name in file_of if name not in found), None):
            raise ValueError(f"{path.parent / file_of[name]} lacks {name}, which the index places there; download the file again")
        return found

    def _pair(self) -> dict[str, StoredFormat]:
        """Every tensor's name -> PLAIN, or the folder's format if its scales are there."""
        form, names = self._format, dict[str, StoredFormat]()
        if form is PLAIN:
            for other, stored in itertools.product((FP8, MXFP4, MXFP8), self._file_of):
                if stored.endswith(other.scales) and stored.removesuffix(other.scales) + other.values in self._file_of:
                    raise ValueError(f"{self._where(stored)} is of a quantised tensor, want a {CONFIG_JSON} with its quantization_config")
            return dict.fromkeys(self._file_of, PLAIN)
        for stored in self._file_of:
            if stored.endswith(form.scales):
                if (values := stored.removesuffix(form.scales) + form.values) not in self._file_of:
                    raise ValueError(f"{self._where(stored)} scales {values}, which is not there; download the folder again")
            elif not form.values:
                names[stored] = form if stored + form.scales in self._file_of else PLAIN
            elif stored.endswith(form.values):
                name = stored.removesuffix(form.values)
                if name + form.scales not in self._file_of:
                    raise ValueError(f"{self._where(stored)} has no scales, want {name}{form.scales}; download the folder again")
                names[name] = form
            else:
                names[stored] = PLAIN
        return names

    def _values(self, name: str) -> str:
        """The name under which a tensor's values are stored."""
        return name + self.names[name].values

    def _where(self, stored: str) -> str:
        """File and tensor; an error begins with it."""
        return f"{self.folder / self._file_of[stored]}: {stored}"

    def _file(self, file: str) -> Any:
        if file not in self._open:
            if len(self._open) == _MOST_OPEN:
                del self._open[next(iter(self._open))]
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                where = f"{self.folder / file} is damaged or no safetensors file{_first_lost(self.folder / file)}"
                raise ValueError(f"{where}: {error}; download the file again") from error
        return self._open[file]

    def _slice(self, stored: str) -> Any:
        return self._file(self._file_of[stored]).get_slice(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor's values.

        Raises:
            ValueError: quantised values that are no matrices, or no whole blocks of MXFP4 or MXFP8.
        """
        form, stored = self.names[name], self._values(name)
        shape = tuple(self._slice(stored).get_shape())
        if form is MXFP4:
            if len(shape) < 3 or shape[-1] != MX_BLOCK // 2:
                raise ValueError(f"{self._where(stored)} is {shape}, want (..., N, K/32, 16); download the file again")
            return (*shape[:-2], shape[-2] * MX_BLOCK)
        if form is not PLAIN and (len(shape) < 2 or (form is MXFP8 and shape[-1] % MX_BLOCK)):
            want = "(..., N, K)" if form is not MXFP8 else f"(..., N, K), K a multiple of {MX_BLOCK}"
            raise ValueError(f"{self._where(stored)} is {shape}, want {want}; download the file again")
        return shape

    def check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        """Raise ValueError if a tensor of a model has another shape."""
        if (found := self.shape(name)) != wanted:
            raise ValueError(f"{self._where(self._values(name))} is {found}, want {wanted}; choose the --model that it is")

    def read(self, name: str, region: Region | None = None, dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        """The values of one tensor.

        Args:
            name: one of `names`.
            region: a slice of every dimension; before the last two an index may stand for one. None: all of it.
            dtype: of values that are stored quantised, multiplied with their scales in float32 and rounded once. Others keep the file's.
            device: where they are put, and multiplied.

        Raises:
            ValueError: a dtype that the format does not have, scales of another shape, scales or products that are no finite numbers.
        """
        value = self._stored(name, region, device)
        if isinstance(value, MXTensor):
            value = value.dequantize()
            if region is not None:  # its columns had been widened to whole blocks
                value = value.narrow(-1, region[-1].start % MX_BLOCK, region[-1].stop - region[-1].start)
        if self.names[name] is PLAIN:
            return value
        self._check_finite(name, bool(value.isfinite().all()))
        return value.to(dtype)

    def read_mx(self, name: str, region: Region | None = None, dtype: torch.dtype = torch.bfloat16, device: Device = "cpu") -> MXTensor:
        """One tensor in MXFP8, in blocks of 32 along its last dimension.

        MXFP8 is returned as it is stored. MXFP4 is converted without loss (`mxep.mx.mxfp4_to_mxfp8`). The values of other formats are
        quantised (RCEIL), FP8 from float32 products: a value differs from the file's by one MXFP8 rounding at most, and not at all if the
        scale is a power of two.

        Args:
            name: one of `names`.
            region: as in `read`; the last dimension's slice begins and ends at multiples of 32.
            dtype: the dtype that the result represents, bf16 or float32.
            device: where it is put, and quantised.

        Raises:
            ValueError: columns that are no multiples of 32; what `read` raises.
        """
        shape = self.shape(name)
        columns = region[-1] if region else slice(0, shape[-1] if shape else 1)
        if columns.start % MX_BLOCK or columns.stop % MX_BLOCK:
            raise ValueError(
                f"{self._where(self._values(name))} has no whole blocks in columns {columns.start} to {columns.stop} of {shape}, want "
                f"multiples of {MX_BLOCK}; read its values"
            )
        value = self._stored(name, region, device)
        if not isinstance(value, MXTensor):
            value = quantize_mx(value if value.dtype in (torch.bfloat16, torch.float32) else value.float())
        self._check_finite(name, not holds_nan(value))
        return MXTensor.from_qdata_and_scales(value.qdata, value.scale, dtype)

    def _check_finite(self, name: str, finite: bool) -> None:
        if not finite:
            raise ValueError(f"{self._where(self._values(name))} has values that are no finite numbers; download the file again")

    def _stored(self, name: str, region: Region | None, device: Device) -> Tensor | MXTensor:
        """A region: plain as it is; of FP8 the values in float32; of MXFP4 and MXFP8 an MXTensor whose columns are whole blocks."""
        form, shape = self.names[name], self.shape(name)
        region = tuple(slice(0, length) for length in shape) if region is None else region
        part = self._slice(self._values(name))
        kinds = _VALUE_DTYPES[form.name]
        if part.get_dtype() not in kinds:
            other = "" if self._format is PLAIN or form is not PLAIN else f", or {self._format.name} with {name}{self._format.scales}"
            raise ValueError(f"{self._where(self._values(name))} is {part.get_dtype()}, want {' or '.join(kinds)}{other}")
        if form is PLAIN:
            return part[region].to(device)
        blocks = tuple(slice(span.start // length, cdiv(span.stop, length)) for span, length in zip(region[-2:], form.block, strict=True))
        scales = self._scales(name, shape, (*region[:-2], *blocks)).to(device)
        if form is MXFP4:
            return mxfp4_to_mxfp8(part[(*region[:-1], blocks[1])].to(device), scales, torch.float32)
        if form is MXFP8:
            whole = slice(blocks[1].start * MX_BLOCK, blocks[1].stop * MX_BLOCK)
            return MXTensor.from_qdata_and_scales(part[(*region[:-1], whole)].to(device), scales, torch.float32)
        for dim, span, length in zip((-2, -1), region[-2:], form.block, strict=True):
            scales = scales.repeat_interleave(length, dim).narrow(dim, span.start % length, span.stop - span.start)
        return part[region].to(device).float() * scales

    def _scales(self, name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        """A region of a tensor's scales: float32 of FP8, else e8m0 bytes in uint8. `shape` is that of the values."""
        form = self.names[name]
        part, where = self._slice(name + form.scales), self._where(name + form.scales)
        kinds = _SCALE_DTYPES[form.name]
        if part.get_dtype() not in kinds:
            raise ValueError(f"{where} is {part.get_dtype()}, want {' or '.join(kinds)}; download the file again")
        found = tuple(part.get_shape())
        wanted = (*shape[:-2], *map(cdiv, shape[-2:], form.block))
        if found != wanted:
            size = "x".join(map(str, form.block))
            raise ValueError(f"{where} is {found}, want {wanted}, one for {size} of {shape}; download the file again")
        scales = part[region]
        if form not in (MXFP4, MXFP8):
            scales = scales.float()
            damaged = ~scales.isfinite() | (scales < 0)
        else:
            scales = scales.view(torch.uint8)
            damaged = scales == E8M0_NAN
        if damaged.any():
            raise ValueError(f"{where} has {int(damaged.sum())} scales that are no finite numbers of at least 0; download the file again")
        return scales


def _first_lost(path: Path) -> str:
    """For an error: the first tensor that does not lie in a file as a whole, by its header; empty if that is damaged too."""
    try:
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(start - 8, MAX_BYTES)))
        held = path.stat().st_size - start
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        lost = [name for name in sorted(ends, key=ends.__getitem__) if ends[name] > held]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    return f", {lost[0]} is cut off" if lost else ""


class PublishedTensor(NamedTuple):
    """A tensor of a folder, or one expert of it.

    Attributes:
        name: of the tensor.
        expert: index in the first dimension of a tensor of three dimensions or more, which is read expert by expert; None: all of it.
        value: without that dimension.
    """

    name: str
    expert: int | None
    value: Tensor


def read_tensors(
    folder: str | Path,
    mx: Callable[[str], bool] = lambda name: False,
    dtype: torch.dtype = torch.bfloat16,
    device: Device = "cpu",
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[PublishedTensor]:
    """All tensors of a Hugging Face folder, one at a time, in the order of the files.

    Args:
        folder: config.json and safetensors files in bf16 or float32, FP8 with block scales, MXFP4 or MXFP8; of any architecture.
        mx: whether the tensor of a name is wanted as an `MXTensor` (`PublishedFiles.read_mx`); else its values are read
            (`PublishedFiles.read`).
        dtype: of values that are stored quantised, and the dtype that an MXTensor represents. Other values keep the file's dtype.
        device: where tensors are put.
        report: takes a progress message after each tensor.

    Returns:
        iterator of PublishedTensor (name, expert, value). A tensor of three dimensions (stacked experts) comes expert by expert.

    Raises:
        ValueError: what `PublishedFiles` and its methods raise.

    Examples:
        >>> import pathlib, tempfile, safetensors.torch
        >>> from mxep.models.huggingface_files import read_tensors
        >>> temporary = tempfile.TemporaryDirectory()
        >>> _ = pathlib.Path(temporary.name, "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
        >>> tensors = {"w_blocks": torch.zeros(2, 4, 3, 16).byte(), "w_scales": torch.zeros(2, 4, 3).byte()}
        >>> safetensors.torch.save_file(tensors, f"{temporary.name}/model.safetensors")
        >>> [(name, expert, tuple(value.shape)) for name, expert, value in read_tensors(temporary.name, mx=lambda name: True)]
        [('w', 0, (4, 96)), ('w', 1, (4, 96))]
    """
    files = PublishedFiles(Path(folder))
    for count, name in enumerate(files.names, 1):
        spans = tuple(slice(0, length) for length in files.shape(name))
        parts = [(None, spans)] if len(spans) < 3 else [(expert, (expert, *spans[1:])) for expert in range(spans[0].stop)]
        for expert, region in parts:
            yield PublishedTensor(name, expert, (files.read_mx if mx(name) else files.read)(name, region, dtype, device))
        report(f"{folder}: read {count} of {len(files.names)} tensors")


def load_published(model: Decoder, folder: Path, any_yarn: bool = False, report: Callable[[str], None] = lambda text: None) -> list[str]:
    """Fill a model's weights in place from a Hugging Face folder; returns lines for the user.

    Args:
        model: on its device, sharded or not; of the same shape as the folder's config.json.
        folder: config.json and safetensors files, as published.
        any_yarn: allow a model whose YaRN differs from the folder's rope_scaling.
        report: takes a progress message after each tensor.

    Raises:
        ValueError: another model, missing or unknown tensors, damaged files.
    """
    config = model.config
    assert isinstance(config, ModelConfig)
    notes = check_published_config(config, folder, any_yarn)
    files, names = PublishedFiles(folder), published_names(config)
    notes += check_names(files, config)
    of_v3, interleaved = files.described["model_type"] == "deepseek_v3", files.described.get("rope_interleave", True)
    halves = of_v3 and not interleaved  # null is false, as in transformers
    wanted = dict[str, tuple[Tensor, tuple[int, ...], Region, list[int] | None]]()  # what is filled, whole shape, region, order of rows
    for name, tensor in model.state_dict().items():
        if names[name][0] not in files.names:
            tensor.zero_()  # optional: the expert bias, which the family does not have
            continue
        local, region = local_shard(tensor)
        rotated, shape = rotated_rows(name, config) if halves else None, tuple(tensor.shape)
        if not is_stacked(name):
            wanted[names[name][0]] = local, shape, region, None if rotated is None else halves_to_pairs(*rotated)
            continue
        for index, expert in enumerate(range(region[0].start, region[0].stop)):
            wanted[names[name][expert]] = local[index], shape[1:], region[1:], None
    with torch.no_grad():
        for count, name in enumerate([name for name in files.names if name in wanted], 1):
            local, shape, region, order = wanted[name]
            files.check_shape(name, shape)
            if order is None:
                local.copy_(files.read(name, region, device=local.device))
            else:
                local.copy_(files.read(name)[order][region])
            report(f"{folder}: read {count} of {len(wanted)} tensors")
    return notes


def check_names(files: PublishedFiles, config: ModelConfig) -> list[str]:
    """Raise ValueError for missing or unknown tensors. Layers past the last (multi-token prediction) are allowed."""
    names = published_names(config)
    wanted = {other for others in names.values() for other in others}
    missing = [other for name, others in names.items() if not is_optional(name, config) for other in others if other not in files.names]
    if missing:
        raise ValueError(f"{files.folder}: {len(missing)} tensors are missing, {missing[0]} first; choose the --model that it is")
    extra = [name for name in files.names if name not in wanted]
    unused = [name for name in extra if _layer_of(name) >= config.num_layers]
    unread = [name for name in extra if name.endswith("rotary_emb.inv_freq") or 0 in files.shape(name)]  # as of no shared experts
    if foreign := [name for name in extra if name not in (*unused, *unread)]:
        raise ValueError(f"{files.folder}: {len(foreign)} tensors are not in this model, {foreign[0]} first; choose the --model that it is")
    return [f"{files.folder}: {len(unused)} tensors of layers past the last (multi-token prediction) are not used"] if unused else []


def _layer_of(name: str) -> int:
    """The layer number in a published name; -1 if there is none."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdigit() else -1

"""Argument checks of the public blocks. Their errors say where, got, want, do."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Literal

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from mxep.device import checking
from mxep.recipe import ScaleCalculationMode, check_block_size, scaling_mode_name
from mxep.shapes import MX_BLOCK

HIGH_PRECISION = (torch.bfloat16, torch.float32)  # dtypes of rows and weights, and of the values that MX bytes represent


def check_tensors(where: str, device: torch.device | None = None, **values: object) -> None:
    """Raise ValueError unless every value is a tensor, on `device` if one is given."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            got = "None" if value is None else type(value).__name__
            raise ValueError(f"{where}: {name} is {got}, want a torch.Tensor; torch.as_tensor makes one of a list")
        if device is not None and value.device != device:
            raise ValueError(f"{where}: {name} is on {value.device}, want {device} like the rows; move it there")


def check_type(where: str, want: type, name: str, value: object, do: str) -> None:
    """Raise ValueError unless a value is an instance of `want`."""
    if not isinstance(value, want):
        raise ValueError(f"{where}: {name} is {'None' if value is None else type(value).__name__}, want {want.__name__}; {do}")


def check_model(where: str, model: object) -> None:
    """Raise ValueError unless it is a module."""
    check_type(where, torch.nn.Module, "model", model, "pass the model itself")


def check_count(where: str, name: str, value: object, least: Literal[0, 1] = 1) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`, or a symbol of a traced graph."""
    if type(value) is int and value >= least:  # at once: asking for an abstract type costs the host as much as an operator
        return
    whole = isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)
    if not whole or (not isinstance(value, torch.SymInt) and value < least):  # type: ignore[operator]
        raise ValueError(f"{where}: {name}={value!r}, want a {'positive whole number' if least else 'whole number from 0 on'}")


def check_rows(where: str, rows: torch.Tensor, quantised: bool) -> None:
    """Raise ValueError unless `rows` is (rows, width) bf16 or float32, and with `quantised` of a width in whole MX blocks."""
    check_tensors(where, input=rows)
    if rows.dim() != 2:
        raise ValueError(f"{where}: input is {tuple(rows.shape)}, want (rows, width); flatten the leading dimensions")
    if rows.dtype not in HIGH_PRECISION:
        raise ValueError(f"{where}: input is {rows.dtype}, want bfloat16 or float32; cast it first")
    if quantised and rows.shape[1] % MX_BLOCK:
        raise ValueError(f"{where}: input is {tuple(rows.shape)}, want a width in multiples of {MX_BLOCK} (one MX block); pad with zeros")


def check_splits(where: str, output_splits: Sequence[int], input_splits: Sequence[int]) -> None:
    """Raise ValueError unless the splits are lists of ints on the host."""
    for name, splits in (("output_splits", output_splits), ("input_splits", input_splits)):
        if not isinstance(splits, (list, tuple)):
            raise ValueError(f"{where}: {name} is {type(splits).__name__}, want list[int] on the host; call .tolist() on it")
        for rows in splits:
            if not isinstance(rows, (int, torch.SymInt)):
                raise ValueError(f"{where}: {name} holds a {type(rows).__name__}, want list[int] on the host; call .tolist() or int()")


def check_alone(where: str, num_rows: int, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str) -> None:
    """Raise ValueError unless splits without a group keep all rows on this rank. With a group, the exchange checks them."""
    if group_name or torch.compiler.is_compiling():
        return
    if not list(input_splits) == list(output_splits) == [num_rows]:
        raise ValueError(
            f"{where}: splits {list(input_splits)} and {list(output_splits)} of {num_rows} rows without a group, want [{num_rows}] twice; "
            "pass the group"
        )


def values_checked(tensor: torch.Tensor) -> bool:
    """True if a check may read `tensor`'s values on the host: in checking mode, outside of a traced graph."""
    return not torch.compiler.is_compiling() and not isinstance(tensor, (FakeTensor, FunctionalTensor)) and checking(tensor.device)


def row_counts(where: str, counts: torch.Tensor) -> list[int] | None:
    """The counts on the host in checking mode, else None. Raises ValueError for one below 0."""
    if not values_checked(counts):
        return None
    values: list[int] = counts.tolist()  # host sync: only in checking mode
    if min(values, default=0) < 0:
        raise ValueError(f"{where}: the counts are {values}, want rows per expert, at least 0")
    return values


def check_mode(where: str, scaling_mode: ScaleCalculationMode, block_size: int) -> str:
    """The scaling mode's name. Raises ValueError for another mode or block size."""
    check_block_size(where, block_size)
    return scaling_mode_name(where, scaling_mode)

"""Public dataclasses of options refuse what their annotations do not allow, NaN and infinity too."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import pytest

from mxep import MoEConfig, Recipe, RuntimeEPConfig, SwiGLU
from mxep.field_types import check_field_types
from mxep.models.presets import MODELS, Yarn
from mxep.parallel_dims import ParallelDims

WHOLE = MoEConfig(64, 32, 4, 2)
INFINITE = float("inf")


@pytest.mark.parametrize("field", [field.name for field in fields(MoEConfig)])
@pytest.mark.parametrize("wrong", [float("nan"), INFINITE, -INFINITE, [], object(), 1j])
def test_values_that_no_field_of_a_layer_accepts(field: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"MoEConfig: {field}="):
        replace(WHOLE, **{field: wrong})


@pytest.mark.parametrize(
    ("options", "wrong", "want"),
    [
        (WHOLE, {"num_shared_experts": 1.5}, "want a whole number"),
        (WHOLE, {"num_shared_experts": True}, "want a whole number"),
        (WHOLE, {"num_shared_experts": None}, "want a whole number"),
        (WHOLE, {"top_k": True}, "want a whole number"),
        (WHOLE, {"route_scale": "1"}, "want a finite number"),
        (WHOLE, {"route_scale": True}, "want a finite number"),
        (WHOLE, {"z_loss": float("nan")}, "want a finite number"),
        (WHOLE, {"renormalize": 1}, "want True or False"),
        (WHOLE, {"renormalize": "false"}, "want True or False"),
        (WHOLE, {"score_function": "relu"}, "want 'softmax' or 'sigmoid'"),
        (WHOLE, {"score_function": ["softmax"]}, "want 'softmax' or 'sigmoid'"),
        (WHOLE, {"swiglu_limit": "10"}, "want a finite number or None"),
        (Recipe("mine"), {"name": 3}, "want a string"),
        (Recipe("mine"), {"dispatch": None}, "want 'mxfp8' or 'hp'"),
        (Recipe("mine"), {"wgrad": "bf16"}, "want 'hp', 'mx' or 'mxfp8'"),
        (Recipe("mine"), {"scaling_mode": "rceil"}, r"want a ScaleCalculationMode \(FLOOR or RCEIL\)"),
        (Recipe("mine"), {"group_size_multiple_of": 32.0}, "want a whole number"),
        (Recipe("mine"), {"gemm_path": None}, "want a string"),
        (RuntimeEPConfig(), {"keep_first_product": 1}, "want True, False or 'mxfp8'"),
        (RuntimeEPConfig(), {"cpu_sync_on_runtime": 0}, "want True or False"),
        (RuntimeEPConfig(), {"scratch_rows": 1.0}, "want a whole number, 'auto' or None"),
        (RuntimeEPConfig(), {"scratch_rows": True}, "want a whole number, 'auto' or None"),
        (RuntimeEPConfig(), {"dispatch_forward": "fp8"}, "want 'mxfp8', 'hp' or None"),
        (Yarn(), {"factor": float("nan")}, "want a finite number"),
        (MODELS["dsv3_debug_cpu"], {"norm_eps": "1e-6"}, "want a finite number"),
        (MODELS["dsv3_debug_cpu"], {"num_layers": 2.0}, "want a whole number"),
    ],
)
def test_wrong_types_are_named(options: Any, wrong: dict[str, Any], want: str) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}=.*{want}"):
        replace(options, **wrong)


def test_degrees_are_checked_where_they_are_used() -> None:
    with pytest.raises(ValueError, match=r"parallelism: ep=2\.0, want a whole number"):
        ParallelDims(ep=2.0).shards(4)


@pytest.mark.parametrize("wrong", ["1", True, None, float("nan"), [1.0]])
def test_forms_of_swiglu(wrong: Any) -> None:
    for name in ("alpha", "offset"):
        with pytest.raises(ValueError, match="SwiGLU: "):
            SwiGLU(**{name: wrong})
    if wrong is not None:
        with pytest.raises(ValueError, match="SwiGLU: "):
            SwiGLU(wrong)


def test_values_that_are_accepted() -> None:
    taken = replace(WHOLE, route_scale=2, num_shared_experts=np.int64(1), z_loss=np.float32(0.5))
    assert taken.route_scale == 2
    assert type(taken.num_shared_experts) is int
    assert RuntimeEPConfig(scratch_rows=np.int64(32)).number == RuntimeEPConfig(scratch_rows=32).number  # type: ignore[arg-type]

    @dataclass
    class Options:
        pair: tuple[int, int] = (1, 2)
        kind: Literal[True, "a"] | None = None

    check_field_types(Options())
    with pytest.raises(ValueError, match=r"here: pair=\[1\], want a tuple"):
        check_field_types(Options([1]), "here")  # type: ignore[arg-type]

"""Published formats on a GPU: values and MXFP8 bytes are those of a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxep.models.huggingface_files import PublishedFiles

pytestmark = pytest.mark.gpu

E4M3 = (torch.randn(200, 288) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
FORMATS: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any] | None]] = {
    "bf16": ({"w": torch.randn(64, 288).bfloat16()}, None),
    "fp8": ({"w": E4M3, "w_scale_inv": torch.rand(2, 3) + 0.1}, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "mxfp4": (
        {
            "w_blocks": torch.randint(256, (3, 64, 9, 16), dtype=torch.uint8),
            "w_scales": torch.randint(240, (3, 64, 9), dtype=torch.uint8),
        },
        {"quant_method": "mxfp4"},
    ),
    "mxfp8": (
        {"w": E4M3, "w_scale": torch.randint(100, 140, (200, 9), dtype=torch.uint8)},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_as_on_a_cpu(kind: str, tmp_path: Path) -> None:
    tensors, described = FORMATS[kind]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    save_file(tensors, tmp_path / "model.safetensors")
    files = PublishedFiles(tmp_path)
    values, mx = files.read("w", device="cuda"), files.read_mx("w", device="cuda")
    assert values.is_cuda
    assert mx.is_cuda
    assert torch.equal(values.cpu(), files.read("w"))
    on_cpu = files.read_mx("w")
    assert torch.equal(mx.qdata.view(torch.uint8).cpu(), on_cpu.qdata.view(torch.uint8))
    assert torch.equal(mx.scale.view(torch.uint8).cpu(), on_cpu.scale.view(torch.uint8))
    rows = tuple(slice(0, length) for length in files.shape("w")[:-1])
    part = files.read("w", (*rows, slice(40, 100)), device="cuda")  # no whole blocks
    assert torch.equal(part.cpu(), files.read("w")[..., 40:100])

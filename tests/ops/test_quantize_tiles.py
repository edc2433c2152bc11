"""How columnwise.cu cuts its input: tiles fit on a multiprocessor, regions are large where the matrix is and many where it is not."""

from __future__ import annotations

import importlib

import pytest

from mxep.ops.runtime.tiles import TRANSPOSE

ALL = [tile for tiles in TRANSPOSE.values() for tile in tiles]
SHARED_BYTES = 227 * 1024  # of a multiprocessor, of which every block takes 1 KB more than it asks for
REGISTERS, LEAST_REGISTERS = 65536, 56  # of a multiprocessor; of a thread


@pytest.mark.parametrize("tile", ALL, ids=str)
def test_blocks_fit(tile):
    assert tile.min_blocks * (tile.shared_bytes + 1024) <= SHARED_BYTES + 1024
    assert tile.min_blocks * tile.threads * LEAST_REGISTERS <= REGISTERS
    assert tile.shared_bytes % 16 == 0


def test_forms_and_options():
    assert set(TRANSPOSE) == {(both, item_bytes) for both in (True, False) for item_bytes in (2, 4)}
    for (both, item_bytes), tiles in TRANSPOSE.items():
        assert {(tile.both, tile.item_bytes) for tile in tiles} == {(both, item_bytes)}
        assert [tile.columns for tile in tiles] == sorted((tile.columns for tile in tiles), reverse=True)
        assert tiles[0].options(scaling=0)["SCALING"] == 0


@pytest.mark.parametrize("width", [32, 1408, 2048, 4096, 7168, 8192])
@pytest.mark.parametrize("height", [32, 128, 1024, 8192, 131072])
@pytest.mark.parametrize("both", [True, False])
def test_cut(both: bool, height: int, width: int, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    launchers = importlib.import_module("mxep.ops.quantize.columnwise")
    monkeypatch.setattr(launchers, "multiprocessors", lambda device: 132)
    launchers._cut.cache_clear()
    tile, down, across, regions = launchers._cut(both, 2, 3, height, width, 0)
    launchers._cut.cache_clear()
    assert (down, across) in (tile.steps, (1, 1))
    per_batch = -(-height // (tile.rows * down)) * -(-width // (tile.columns * across))
    assert regions == 3 * per_batch
    if height == 131072 and width > 32:
        assert regions >= 132
        assert -(-width // tile.columns) * tile.columns <= 1.05 * width
        assert (down, across) == tile.steps
    if height <= 8192:
        assert tile is TRANSPOSE[both, 2][-1]
    if height == 128:
        assert (down, across) == (1, 1)

"""Slot buffers of virtual ranks in one process: row counts, the expected bytes of every slot, the expected results."""

from __future__ import annotations

import itertools
from types import ModuleType

import torch
from tests.p2p_cases import values

from mxep import reference
from mxep.ops.peer_write.slots_reference import HEADER_BYTES, PeerMessage
from mxep.shapes import record_bytes

NUMBER = 5  # of the call
_POISON = 0xFF
TABLES = {  # rows that each rank sends to each
    "alone": [[7]],
    "two": [[3, 8], [1, 5]],
    "uneven": [[0, 9, 1], [4, 0, 0], [2, 2, 11]],
    "starved": [[0, 0, 0, 0], [0, 6, 0, 1], [0, 13, 2, 0], [0, 1, 0, 0]],
    "five": [[i * j % 7 for i in range(5)] for j in range(5)],
}


class Case:
    """One exchange through slots: every rank's rows, and the messages as sender and receiver describe them."""

    def __init__(self, table: list[list[int]], width: int, dtype: torch.dtype, per: int, device: str = "cpu") -> None:
        self.table, self.world, self.device = table, len(table), device
        self.slot_bytes = HEADER_BYTES + per * record_bytes(width) + 48  # more than it takes
        self.rows = [values(sum(line), width, dtype, seed=rank).to(device) for rank, line in enumerate(table)]
        self.slots = self.empty(device)
        starts = [list(itertools.accumulate(line, initial=0)) for line in table]
        ends = [list(itertools.accumulate((line[r] for line in table), initial=0)) for r in range(self.world)]
        ranks = range(self.world)
        self.sent = [[PeerMessage(self._slots_of(r, s), starts[s][r], table[s][r], per, s + r) for r in ranks] for s in ranks]
        self.received = [[PeerMessage(self._slots_of(r, s), ends[r][s], table[s][r], per, s + r) for s in ranks] for r in ranks]
        self.rounds = max(pair.rounds for pairs in self.sent for pair in pairs)

    def empty(self, device: str) -> list[torch.Tensor]:
        """Every rank's slots, poisoned."""
        return [torch.full((self.world * 2 * self.slot_bytes,), _POISON, dtype=torch.uint8, device=device) for _ in self.table]

    def _slots_of(self, owner: int, sender: int) -> int:
        return self.slots[owner].data_ptr() + sender * 2 * self.slot_bytes

    def write_expected(self, mode: str, step: int, slots: list[torch.Tensor]) -> None:
        """Writes into `slots`, on the CPU, the bytes that round `step` must leave there."""
        for s, r in itertools.product(range(self.world), repeat=2):
            pair = self.sent[s][r]
            if step < max(1, -(-pair.rows // pair.per)):
                at = (2 * s + (pair.before + step) % 2) * self.slot_bytes
                first = pair.first + step * pair.per
                records = reference.quantize_packed(self.rows[s][first : first + min(pair.per, pair.rows - step * pair.per)].cpu(), mode)
                header = torch.tensor([NUMBER, pair.rows, records.shape[1], step], dtype=torch.int32).view(torch.uint8)
                slots[r][at : at + 16] = header
                slots[r][at + HEADER_BYTES :][: records.numel()] = records.flatten()

    def outputs(self) -> list[torch.Tensor]:
        """Poisoned outputs of every rank."""
        width, like = self.rows[0].shape[1], {"dtype": self.rows[0].dtype, "device": self.device}
        return [torch.full((sum(line[r] for line in self.table), width), torch.nan, **like) for r in range(self.world)]

    def error(self) -> torch.Tensor:
        return torch.zeros(1 + self.world, 8, dtype=torch.int32, pin_memory=self.device != "cpu")

    def expected_output(self, mode: str, rank: int) -> torch.Tensor:
        """What `rank` must receive, on the device of the rows and with its own quantiser and dequantiser."""
        parts = [rows.split(line)[rank] for rows, line in zip(self.rows, self.table, strict=True)]
        records = torch.ops.mxep.quantize_packed(torch.cat(parts), mode)
        out = torch.empty(records.shape[0], self.rows[0].shape[1], dtype=self.rows[0].dtype, device=self.device)
        torch.ops.mxep.dequantize_packed_into(records, out)
        return out


def run(case: Case, mode: str, ops: ModuleType) -> list[torch.Tensor]:
    """Runs every round with the functions of `ops` and checks the slots after each; returns what every rank receives."""
    want, outs, error = case.empty("cpu"), case.outputs(), case.error()
    for step in range(case.rounds):
        for s in range(case.world):
            ops.send_slots(case.rows[s], case.sent[s], step, case.slot_bytes, NUMBER, mode)
        case.write_expected(mode, step, want)
        for got, truth in zip(case.slots, want, strict=True):
            assert torch.equal(got.cpu(), truth), f"round {step}"
        for r in range(case.world):
            ops.recv_slots(outs[r], case.received[r], step, case.slot_bytes, NUMBER, error)
    if case.device != "cpu":
        torch.cuda.synchronize()
    assert not error.any()
    return outs


def run_disagreeing(ops: ModuleType, device: str) -> None:
    """One of two headers differs from what the receiver expects, in rows, record size or call: NaN in that sender's rows alone."""
    for changed in ("rows", "call", "record"):
        case = Case([[3, 4], [2, 5]], 96, torch.bfloat16, per=8, device=device)
        for s in range(2):
            ops.send_slots(case.rows[s], case.sent[s], 0, case.slot_bytes, NUMBER, "rceil")
        header = case.slots[0][2 * case.slot_bytes + (1 % 2) * case.slot_bytes :][:16].view(torch.int32)
        header[{"call": 0, "rows": 1, "record": 2}[changed]] += 1
        out, error = case.outputs()[0].fill_(3), case.error()
        ops.recv_slots(out, case.received[0], 0, case.slot_bytes, NUMBER, error)
        if device != "cpu":
            torch.cuda.synchronize()
        assert out[3:].isnan().all()
        assert torch.equal(out[:3].nan_to_num(), case.expected_output("rceil", 0)[:3].nan_to_num())
        assert error[0, 0] == 1
        assert not error[1].any()
        assert error[2].tolist() == [*header.tolist(), NUMBER, 2, record_bytes(96), 0]

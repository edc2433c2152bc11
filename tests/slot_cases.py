"""Mailboxes of virtual ranks in one process: who sends how many rows, what must lie in every slot, what must come out."""

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
    """One exchange through slots: every rank's rows, and the messages as sender and receiver see them."""

    def __init__(self, table: list[list[int]], width: int, dtype: torch.dtype, per: int, device: str = "cpu") -> None:
        self.table, self.world, self.device = table, len(table), device
        self.slot_bytes = HEADER_BYTES + per * record_bytes(width) + 48  # more than it takes
        self.rows = [values(sum(line), width, dtype, seed=rank).to(device) for rank, line in enumerate(table)]
        self.boxes = self.empty(device)
        starts = [list(itertools.accumulate(line, initial=0)) for line in table]
        ends = [list(itertools.accumulate((line[r] for line in table), initial=0)) for r in range(self.world)]
        ranks = range(self.world)
        self.away = [[PeerMessage(self._slots(r, s), starts[s][r], table[s][r], per, s + r) for r in ranks] for s in ranks]
        self.home = [[PeerMessage(self._slots(r, s), ends[r][s], table[s][r], per, s + r) for s in ranks] for r in ranks]
        self.rounds = max(pair.rounds for pairs in self.away for pair in pairs)

    def empty(self, device: str) -> list[torch.Tensor]:
        """Every rank's slots before anything is written."""
        return [torch.full((self.world * 2 * self.slot_bytes,), _POISON, dtype=torch.uint8, device=device) for _ in self.table]

    def _slots(self, owner: int, sender: int) -> int:
        return self.boxes[owner].data_ptr() + sender * 2 * self.slot_bytes

    def expected(self, mode: str, step: int, boxes: list[torch.Tensor]) -> None:
        """Put into `boxes`, on the CPU, what round `step` must leave there."""
        for s, r in itertools.product(range(self.world), repeat=2):
            pair = self.away[s][r]
            if step < max(1, -(-pair.rows // pair.per)):
                at = (2 * s + (pair.before + step) % 2) * self.slot_bytes
                first = pair.first + step * pair.per
                sent = reference.quantize_packed(self.rows[s][first : first + min(pair.per, pair.rows - step * pair.per)].cpu(), mode)
                header = torch.tensor([NUMBER, pair.rows, sent.shape[1], step], dtype=torch.int32).view(torch.uint8)
                boxes[r][at : at + 16] = header
                boxes[r][at + HEADER_BYTES :][: sent.numel()] = sent.flatten()

    def outputs(self) -> list[torch.Tensor]:
        """Poisoned memory for what every rank receives."""
        width, like = self.rows[0].shape[1], {"dtype": self.rows[0].dtype, "device": self.device}
        return [torch.full((sum(line[r] for line in self.table), width), torch.nan, **like) for r in range(self.world)]

    def error(self) -> torch.Tensor:
        return torch.zeros(1 + self.world, 8, dtype=torch.int32, pin_memory=self.device != "cpu")

    def wanted(self, mode: str, rank: int) -> torch.Tensor:
        """What `rank` must receive, on the device of the rows and with its own quantiser and dequantiser."""
        parts = [rows.split(line)[rank] for rows, line in zip(self.rows, self.table, strict=True)]
        records = torch.ops.mxep.quantize_packed(torch.cat(parts), mode)
        out = torch.empty(records.shape[0], self.rows[0].shape[1], dtype=self.rows[0].dtype, device=self.device)
        torch.ops.mxep.dequantize_packed_into(records, out)
        return out


def run(case: Case, mode: str, mail: ModuleType) -> list[torch.Tensor]:
    """Every round with the functions of `mail`, the boxes looked at after each: what every rank receives."""
    want, outs, trouble = case.empty("cpu"), case.outputs(), case.error()
    for step in range(case.rounds):
        for s in range(case.world):
            mail.send_slots(case.rows[s], case.away[s], step, case.slot_bytes, NUMBER, mode)
        case.expected(mode, step, want)
        for box, truth in zip(case.boxes, want, strict=True):
            assert torch.equal(box.cpu(), truth), f"round {step}"
        for r in range(case.world):
            mail.recv_slots(outs[r], case.home[r], step, case.slot_bytes, NUMBER, trouble)
    if case.device != "cpu":
        torch.cuda.synchronize()
    assert not trouble.any()
    return outs


def run_disagreeing(mail: ModuleType, device: str) -> None:
    """A receiver that awaits other rows, other records or another call than one of two senders told: NaN in that one's rows alone."""
    for changed in ("rows", "call", "record"):
        case = Case([[3, 4], [2, 5]], 96, torch.bfloat16, per=8, device=device)
        for s in range(2):
            mail.send_slots(case.rows[s], case.away[s], 0, case.slot_bytes, NUMBER, "rceil")
        header = case.boxes[0][2 * case.slot_bytes + (1 % 2) * case.slot_bytes :][:16].view(torch.int32)
        header[{"call": 0, "rows": 1, "record": 2}[changed]] += 1
        out, trouble = case.outputs()[0].fill_(3), case.error()
        mail.recv_slots(out, case.home[0], 0, case.slot_bytes, NUMBER, trouble)
        if device != "cpu":
            torch.cuda.synchronize()
        assert out[3:].isnan().all()
        assert torch.equal(out[:3].nan_to_num(), case.wanted("rceil", 0)[:3].nan_to_num())
        assert trouble[0, 0] == 1
        assert not trouble[1].any()
        assert trouble[2].tolist() == [*header.tolist(), NUMBER, 2, record_bytes(96), 0]

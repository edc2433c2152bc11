"""A rank killed or stopped in a fused layer over symmetric memory, with real processes and no GPU: buffers are files, streams are hosts."""

from __future__ import annotations

import pytest
from tests.faults import check_others_end


@pytest.mark.parametrize(
    ("moment", "name_of_signal"), [("between steps", "SIGSTOP"), ("first meeting", "SIGKILL"), ("last meeting", "SIGSTOP")]
)
def test_the_others_end(moment: str, name_of_signal: str) -> None:
    check_others_end(2, "cpu", moment, name_of_signal, timeout_s=2)

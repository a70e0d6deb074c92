"""The durable record of every turn: the only source of training data.

`Ledger` is what the loops use; `records` and `export` read it from other connections; everything else is inside.
"""

from claw_train.ledger.ledger import Ledger
from claw_train.ledger.states import (
    CompleteGroup,
    DropReason,
    GroupRecord,
    LedgerCounts,
    Recovery,
    State,
    StepStatus,
)

__all__ = [
    "CompleteGroup",
    "DropReason",
    "GroupRecord",
    "Ledger",
    "LedgerCounts",
    "Recovery",
    "State",
    "StepStatus",
]

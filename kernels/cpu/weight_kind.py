"""How a packed weight is multiplied, as its header says it to the library."""

from enum import IntEnum


class WeightKind(IntEnum):
    """`WeightKind` in gemm.h."""

    FLOAT = 0
    INT8 = 1
    INT8_WEIGHTS = 2
    AMX_BF16 = 3
    AMX_INT8 = 4
    DOT_BF16 = 5
    NIBBLES = 6
    BYTES = 7
    AMX_NIBBLES = 8
    AMX_BYTES = 9

    @property
    def reads_bf16(self) -> bool:
        """Whether its product takes rows of bf16 only."""
        return self in (WeightKind.AMX_BF16, WeightKind.DOT_BF16) or self.is_coded

    @property
    def is_coded(self) -> bool:
        return self >= WeightKind.NIBBLES

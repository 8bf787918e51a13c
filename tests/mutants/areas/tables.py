"""Mutants: cos/sin tables, lowering."""

from ..breaks import Group
from ..selections import SCHEMES

TABLES = (*SCHEMES, "tests/rotary/test_query_scales.py")

GROUPS = (
    Group(
        "tables",
        "python/flashrope/lowering/cos_sin.py",
        TABLES,
        (
            (
                "tables are built in float32",
                "    positions = positions.to(torch.float64)\n",
                "    positions = positions.to(torch.float32)\n",
            ),
            (
                "the coarse rows lack the offset",
                "slope * blocks + offset]",
                "slope * blocks]",
            ),
            (
                "the coarse table is one row short",
                "return 1 << max(-(-positions // FINE_ROWS) - 1, 0).bit_length()",
                "return 1 << max(positions // FINE_ROWS - 1, 0).bit_length()",
            ),
            (
                "coarse rows are a fine row apart",
                "torch.arange(coarse, dtype=torch.float64) * FINE_ROWS",
                "torch.arange(coarse, dtype=torch.float64) * (FINE_ROWS + 1)",
            ),
            (
                "the table lacks the factor on rotated channels",
                "each[:, FINE_ROWS:] *= factors",
                "each *= 1",
            ),
            (
                "padded pairs rotate",
                "pad(cos, missing, value=1.0)",
                "pad(cos, missing)",
            ),
        ),
    ),
    Group(
        "tables",
        "python/flashrope/lowering/lowered.py",
        TABLES,
        (
            (
                "a step between bands has the wrong sign",
                "PositionMap(rotation.slope - before.slope, rotation.offset - before.offset)",
                "PositionMap(before.slope - rotation.slope, before.offset - rotation.offset)",
            ),
            (
                "a copy of keys ends with its first band",
                "            max(stop for (_, stop), row in zip(ranges, rows, strict=True) if row[3] == copy) for copy in k_copies\n",
                "            min(stop for (_, stop), row in zip(ranges, rows, strict=True) if row[3] == copy) for copy in k_copies\n",
            ),
            (
                "keys have the factor on rotated channels",
                "number(q_map, True, rotary.rotated_scale), number(k_map, False)",
                "number(q_map, True, rotary.rotated_scale), number(k_map, False, rotary.rotated_scale)",
            ),
            (
                "the last rotating pair is left out",
                "max((m + 1 for m, frequency",
                "max((m for m, frequency",
            ),
        ),
    ),
)

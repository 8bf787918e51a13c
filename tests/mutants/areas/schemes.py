"""Mutants: schemes, bands, what all backends share."""

from ..breaks import Group
from ..selections import SCHEMES

GROUPS = (
    Group(
        "schemes",
        "python/flashrope/rotary/rotary.py",
        SCHEMES,
        (
            (
                "PI multiplies",
                "[f / factor for f in self.frequencies]",
                "[f * factor for f in self.frequencies]",
            ),
            (
                "YaRN's temperature is not squared",
                "(0.1 * math.log(factor) + 1) ** 2 if",
                "(0.1 * math.log(factor) + 1) if",
            ),
            (
                "YaRN forgets an earlier temperature",
                "temperature=self.temperature * temperature)",
                "temperature=temperature)",
            ),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/rotary/tables.py",
        SCHEMES,
        (
            (
                "HoPE keeps one pair too few",
                "kept = sum(f >= 2 * math.pi / train_length for",
                "kept = sum(f > 2.1 * math.pi / train_length for",
            ),
            (
                "HoPE cuts at pi / L",
                "kept = sum(f >= 2 * math.pi / train_length for",
                "kept = sum(f >= math.pi / train_length for",
            ),
            (
                "NTK-aware divides by D",
                "decay = [2 * m / (dim - 2) for m",
                "decay = [2 * m / dim for m",
            ),
            (
                "NTK-fixed starts at m = 0",
                "decay = [2 * (m + 1) / dim for m",
                "decay = [2 * m / dim for m",
            ),
            (
                "YaRN's ramp runs the other way",
                "changed.append(f / factor * interpolated + f * (1 - interpolated))",
                "changed.append(f * interpolated + f / factor * (1 - interpolated))",
            ),
            (
                "YaRN's ramp is not rounded",
                "low, high = math.floor(low), math.ceil(high)",
                "low, high = low, high",
            ),
            (
                "CoPE clips one pair too few",
                "last = r == len(slow) - 1",
                "last = r == len(slow)",
            ),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/rotary/axes.py",
        ("tests/rotary/test_axial.py", "tests/rotary/test_mrope.py", "-k", "not triton"),
        (
            (
                "axial tables repeat the first axis",
                "tuple(a for a, count in enumerate(counts) for _ in range(count))",
                "tuple(0 * a for a, count in enumerate(counts) for _ in range(count))",
            ),
            (
                "the tables of the axes are in the order of the axes, whatever axis says",
                "return tuple(next(remaining[a]) for a in order), order",
                "return tuple(f for table in tables for f in table), order",
            ),
            (
                "an axis has the table of half as many pairs",
                "geometric_table(base, 2 * entry)",
                "geometric_table(base**2, 2 * entry)",
            ),
            (
                "axes need not add up",
                "    if sum(counts) != pairs:\n",
                "    if sum(counts) > 2 * pairs:\n",
            ),
            (
                "interleaved sections take turns to the end",
                "m % axes if m < axes * sections[m % axes] else 0 for",
                "m % axes for",
            ),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/rotary/bands.py",
        SCHEMES,
        (
            (
                "ReRoPE's constant distance is off by one",
                "return Band(window, math.inf, slope, window - window * slope)",
                "return Band(window, math.inf, slope, window - window * slope + 1)",
            ),
            (
                "Leaky ReRoPE grows by the factor",
                '        slope = 1.0 / positive("factor", factor, finite=False)\n',
                '        slope = 1.0 * positive("factor", factor, finite=False)\n',
            ),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/rotary/bands.py",
        SCHEMES,
        (
            (
                "the mirror image of a band is off by one",
                "Band(1 - stop, 1 - start, slope, -offset)",
                "Band(-stop, -start, slope, -offset)",
            ),
            (
                "the mirror image keeps the offset",
                "Band(1 - stop, 1 - start, slope, -offset)",
                "Band(1 - stop, 1 - start, slope, offset)",
            ),
            (
                "bands may overlap",
                "        if start < before:\n",
                "        if start < before - 1:\n",
            ),
            (
                "a cut band loses its last distance",
                "stop=min(band.stop, stop))",
                "stop=min(band.stop, stop - 1))",
            ),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/backends/calls.py",
        ("tests/operators/test_accuracy.py::test_the_reference_is_the_formula", "tests/operators/test_identities.py"),
        (
            (
                "log n lacks its floor",
                "1 / math.log(train_length), 1.0 if clip else 0.0",
                "1 / math.log(train_length), 0.0",
            ),
            (
                "log n counts one token more",
                "1 / math.log(train_length), 1.0 if clip else 0.0",
                "1 / math.log(train_length + 1), 1.0 if clip else 0.0",
            ),
            (
                "the temperature is left out",
                "return self.softmax_scale * self.rotary.temperature",
                "return self.softmax_scale",
            ),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/backends/calls.py",
        ("tests/caches/test_decode_varlen.py", "tests/caches/test_decode.py", "-k", "cpu and not compiled"),
        (
            (
                "packed queries lose their last row",
                "rows = slice(starts[begin], starts[begin] + (end - begin) * length)",
                "rows = slice(starts[begin], starts[begin] + (end - begin) * length - 1)",
            ),
            (
                "left padding beyond the end is believed",
                "[(min(max(pad, 0), end), end) for pad",
                "[(max(pad, 0), end) for pad",
            ),
            (
                "a slot lies in the next page",
                "entry = (slot // page_size).clamp(",
                "entry = ((slot + 1) // page_size).clamp(",
            ),
            (
                "new keys go to a page that does not exist",
                "fits & (page >= 0) & (page < k_cache.shape[0])",
                "fits & (page < k_cache.shape[0])",
            ),
        ),
    ),
)

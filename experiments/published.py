"""Holds the figures that the papers published, with their places in the papers. This file has only data.

    hope      Chen et al. 2025, HoPE (arXiv 2410.21216); hope-v1 is its first version (arXiv 2410.21216v1)
    rerope    Su 2023, ReRoPE (kexue.fm/archives/9708)

A row is (the paper's name of the scheme, the scheme's name in this package, figures). In a scheme's name, {w64} is a
window of 64 at the paper's training length of 512, and {L2} is a model trained at twice that length. The factor of PI
and NTK in the ReRoPE tables is 4096 / 512 = 8.
"""

from __future__ import annotations

import dataclasses

from .statistics import HIGHER, LOWER


@dataclasses.dataclass(frozen=True)
class Column:
    """Describes a column: a task at one multiple of the training length, or at a number of sequences if ``multiple`` is
    False."""

    label: str
    task: str
    at: float
    multiple: bool = True


@dataclasses.dataclass(frozen=True)
class Published:
    """Holds one table of a paper.

    Attributes:
        better: which figures are better, HIGHER or LOWER.
        average: whether the table has a last column with the mean of the other columns, as the paper states it.
        orders: the columns by which the paper's ordering of the rows is compared with the ordering measured here.
    """

    title: str
    place: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, str, tuple[float, ...]], ...]
    orders: tuple[str, ...]
    better: int = HIGHER
    average: bool = False
    note: str = ""


COUNTS = tuple(Column(str(count), "copying", count, multiple=False) for count in (30, 40, 50, 60, 70, 80))


def _inputs(task: str) -> tuple[Column, ...]:
    """Returns one column of the task for each of the paper's input lengths."""
    return tuple(Column(str(length), task, length / 512) for length in (256, 512, 768, 1024, 1280))


ACCURACIES = (
    Column("512 (train)", "accuracy", 1),
    Column("4096 (repeat)", "accuracy-repeat", 8),
    Column("4096 (non-repeat)", "accuracy-non-repeat", 8),
)
REPEATS = ("4096 (repeat)", "4096 (non-repeat)")
YARN_NOTE = "The paper's average of RoPE + YaRN is not the mean of its row, 53.03."
AB2_NOTE = "The paper's average of AB2 is not the mean of its row, 26.47."
FACTOR_NOTE = (
    "The paper does not give the factor of PI and YaRN, or whether models were tuned for it; here it is the longest "
    "input divided by the training length, without tuning."
)

TABLES = {
    "copying": (
        Published(
            "In-context copying",
            "hope, table 2",
            COUNTS,
            (
                ("ALiBi", "alibi", (78.00, 64.00, 25.90, 8.30, 2.30, 1.20, 29.95)),
                ("KERPLE", "kerple", (80.20, 74.00, 64.60, 56.80, 25.60, 21.70, 53.82)),
                ("FIRE", "fire", (70.00, 43.20, 28.20, 6.40, 2.80, 0.20, 25.13)),
                ("RoPE", "rope", (77.60, 55.80, 9.40, 0.00, 0.00, 0.00, 23.80)),
                ("RoPE + PI", "pi-s2", (76.40, 61.40, 20.20, 4.60, 0.00, 0.00, 27.10)),
                ("RoPE + YaRN", "yarn-s2", (65.20, 49.80, 64.40, 50.80, 48.60, 39.40, 54.20)),
                ("HoPE", "hope", (84.00, 77.00, 77.00, 60.40, 32.40, 30.60, 60.23)),
                ("HoPE + PI", "hope+pi-s2", (80.20, 74.20, 73.60, 60.60, 36.80, 39.40, 60.80)),
                ("HoPE + YaRN", "hope+yarn-s2", (78.60, 73.20, 76.00, 69.00, 68.40, 46.60, 68.63)),
            ),
            ("Avg.",),
            average=True,
            note=f"{FACTOR_NOTE} {YARN_NOTE}",
        ),
    ),
    "few-shot": (
        Published(
            "Few-shot following",
            "hope, table 3",
            _inputs("few-shot"),
            (
                ("ALiBi", "alibi", (99.67, 85.67, 68.67, 6.33, 1.00, 52.27)),
                ("KERPLE", "kerple", (77.17, 70.17, 22.33, 14.67, 16.33, 40.13)),
                ("FIRE", "fire", (87.17, 86.33, 32.17, 19.50, 19.33, 48.90)),
                ("RoPE", "rope", (98.17, 97.00, 51.33, 17.00, 7.00, 54.10)),
                ("RoPE + PI", "pi-s2.5", (98.17, 98.83, 66.67, 38.50, 8.00, 62.03)),
                ("RoPE + YaRN", "yarn-s2.5", (99.83, 85.67, 91.00, 81.67, 20.33, 75.70)),
                ("HoPE", "hope", (99.67, 98.33, 74.50, 67.83, 55.67, 79.20)),
                ("HoPE + PI", "hope+pi-s2.5", (99.17, 98.50, 83.67, 78.67, 51.67, 82.33)),
                ("HoPE + YaRN", "hope+yarn-s2.5", (97.33, 92.17, 91.67, 88.67, 99.00, 93.77)),
            ),
            ("Avg.",),
            average=True,
            note=FACTOR_NOTE,
        ),
        Published(
            "Few-shot following, SST-2; here a sentence",
            "hope, table 6",
            _inputs("few-shot-sentence"),
            (
                ("ALiBi", "alibi", (99.00, 58.00, 29.00, 4.00, 0.00, 38.00)),
                ("KERPLE", "kerple", (50.50, 37.50, 18.00, 9.00, 6.00, 24.20)),
                ("FIRE", "fire", (99.50, 99.00, 76.50, 31.50, 3.00, 61.90)),
                ("RoPE", "rope", (99.50, 96.00, 20.00, 0.00, 0.00, 43.10)),
                ("RoPE + PI", "pi-s2.5", (99.50, 96.50, 33.00, 4.50, 0.00, 46.70)),
                ("RoPE + YaRN", "yarn-s2.5", (99.50, 57.00, 73.00, 73.00, 0.00, 60.50)),
                ("HoPE", "hope", (99.00, 95.00, 45.50, 52.50, 32.00, 64.80)),
                ("HoPE + PI", "hope+pi-s2.5", (97.50, 97.50, 97.00, 37.00, 89.00, 83.60)),
                ("HoPE + YaRN", "hope+yarn-s2.5", (100.00, 97.50, 76.00, 69.00, 98.00, 88.10)),
            ),
            ("Avg.",),
            average=True,
            note=FACTOR_NOTE,
        ),
        Published(
            "Few-shot following, QNLI; here a question and an answer",
            "hope, table 6",
            _inputs("few-shot-question"),
            (
                ("ALiBi", "alibi", (100.00, 99.00, 79.00, 0.00, 0.00, 55.60)),
                ("KERPLE", "kerple", (100.00, 95.00, 32.00, 7.00, 4.00, 47.60)),
                ("FIRE", "fire", (99.00, 99.00, 18.00, 19.00, 12.00, 49.40)),
                ("RoPE", "rope", (95.00, 95.00, 85.00, 22.00, 9.00, 61.20)),
                ("RoPE + PI", "pi-s2.5", (100.00, 100.00, 94.00, 75.00, 11.00, 76.00)),
                ("RoPE + YaRN", "yarn-s2.5", (100.00, 100.00, 100.00, 95.00, 9.00, 80.80)),
                ("HoPE", "hope", (100.00, 100.00, 100.00, 88.00, 37.00, 85.00)),
                ("HoPE + PI", "hope+pi-s2.5", (100.00, 100.00, 100.00, 100.00, 55.00, 91.00)),
                ("HoPE + YaRN", "hope+yarn-s2.5", (92.00, 80.00, 99.00, 99.00, 100.00, 94.00)),
            ),
            ("Avg.",),
            average=True,
            note=FACTOR_NOTE,
        ),
        Published(
            "Few-shot following, RTE; here a pair of sentences",
            "hope, table 6",
            _inputs("few-shot-pair"),
            (
                ("ALiBi", "alibi", (100.00, 100.00, 98.00, 15.00, 3.00, 63.20)),
                ("KERPLE", "kerple", (81.00, 78.00, 17.00, 28.00, 39.00, 48.60)),
                ("FIRE", "fire", (63.00, 61.00, 2.00, 8.00, 43.00, 35.40)),
                ("RoPE", "rope", (100.00, 100.00, 49.00, 29.00, 12.00, 58.00)),
                ("RoPE + PI", "pi-s2.5", (95.00, 100.00, 73.00, 36.00, 13.00, 63.40)),
                ("RoPE + YaRN", "yarn-s2.5", (100.00, 100.00, 100.00, 77.00, 52.00, 85.80)),
                ("HoPE", "hope", (100.00, 100.00, 78.00, 63.00, 98.00, 87.80)),
                ("HoPE + PI", "hope+pi-s2.5", (100.00, 98.00, 54.00, 99.00, 11.00, 72.40)),
                ("HoPE + YaRN", "hope+yarn-s2.5", (100.00, 99.00, 100.00, 98.00, 99.00, 99.20)),
            ),
            ("Avg.",),
            average=True,
            note=FACTOR_NOTE,
        ),
    ),
    "ablation": (
        Published(
            "HoPE's ablations: copying",
            "hope, table 4",
            COUNTS,
            (
                ("RoPE", "rope", (77.60, 55.80, 9.40, 0.00, 0.00, 0.00, 23.80)),
                ("AB1", "hope-ab1", (83.80, 68.80, 17.80, 21.80, 12.00, 25.60, 38.30)),
                ("AB2", "hope-ab2", (81.40, 59.60, 16.80, 1.00, 0.00, 0.00, 24.47)),
                ("AB3", "hope-ab3", (65.60, 30.6, 6.20, 2.00, 0.80, 0.00, 17.53)),
                ("HoPE", "hope", (84.00, 77.00, 77.00, 60.40, 32.40, 30.60, 60.23)),
            ),
            ("Avg.",),
            average=True,
            note=AB2_NOTE,
        ),
    ),
    "lengths": (
        Published(
            "HoPE's perplexity by training length",
            "hope-v1, table 5",
            tuple(Column(str(length), "perplexity", length / 512) for length in (512, 1024, 2048, 4096, 8192, 16384)),
            (
                ("512", "hope{L1}", (8.5241, 9.1419, 10.1830, 13.0257, 19.6137, 34.8469)),
                ("1024", "hope{L2}", (8.1137, 7.8897, 8.1023, 8.8615, 11.3563, 19.0351)),
                ("2048", "hope{L4}", (7.8704, 7.5870, 7.3026, 7.8704, 9.3932, 10.1004)),
            ),
            ("512", "4096", "16384"),
            LOWER,
        ),
    ),
    "few-shot-lengths": (
        Published(
            "HoPE's few-shot following by training length",
            "hope-v1, table 6",
            tuple(Column(str(length), "few-shot", length / 512) for length in (512, 1024, 1536, 2048, 3072, 4096)),
            (
                ("512", "hope{L1}", (96.00, 90.00, 88.67, 83.00, 70.83, 67.83)),
                ("1024", "hope{L2}", (100.00, 95.00, 96.17, 87.67, 83.83, 81.67)),
                ("2048", "hope{L4}", (100.00, 100.00, 99.00, 96.00, 91.17, 86.33)),
            ),
            ("1024", "4096"),
        ),
    ),
    "rerope-schemes": (
        Published(
            "Schemes without fine-tuning (except HFWA)",
            "rerope, first table",
            ACCURACIES,
            (
                ("Baseline", "rope", (49.41, 24.17, 23.16)),
                ("Baseline-log n", "rope+logn", (49.40, 24.60, 24.02)),
                ("PI", "pi-s8", (49.41, 15.04, 13.54)),
                ("PI-log n", "pi-s8+logn", (49.40, 14.99, 16.51)),
                ("NTK-old", "ntk-old-s8", (49.41, 51.28, 39.27)),
                ("NTK-log n-old", "ntk-old-s8+logn", (49.40, 61.71, 43.75)),
                ("NTK-fixed", "ntk-fixed-s8", (49.41, 51.86, 39.61)),
                ("NTK-log n†-fixed", "ntk-fixed-s8+dagger", (49.41, 55.94, 41.11)),
                ("NTK-log n-fixed", "ntk-fixed-s8+logn", (49.40, 62.85, 44.14)),
                ("NTK-mixed", "ntk-mixed-s8", (49.41, 53.09, 40.12)),
                ("NTK-log n†-mixed", "ntk-mixed-s8+dagger", (49.41, 59.11, 42.38)),
                ("NTK-log n-mixed", "ntk-mixed-s8+logn", (49.40, 68.91, 45.41)),
                ("ReRoPE-w256", "rerope{w256}", (49.41, 77.90, 48.48)),
                ("ReRoPE-w256-log n†", "rerope{w256}+dagger", (49.41, 82.40, 48.85)),
                ("ReRoPE-w256-log n", "rerope{w256}+logn", (49.40, 85.12, 49.07)),
                ("HFWA", "hfwa", (48.70, 80.84, 48.15)),
            ),
            REPEATS,
        ),
    ),
    "rerope-windows": (
        Published(
            "ReRoPE's windows",
            "rerope, second table",
            ACCURACIES,
            (
                ("w64", "rerope{w64}", (49.41, 69.39, 45.19)),
                ("w64-log n†", "rerope{w64}+dagger", (49.41, 78.58, 47.42)),
                ("w64-log n", "rerope{w64}+logn", (49.40, 84.38, 48.14)),
                ("w128", "rerope{w128}", (49.41, 76.11, 47.82)),
                ("w128-log n†", "rerope{w128}+dagger", (49.41, 82.28, 48.78)),
                ("w128-log n", "rerope{w128}+logn", (49.40, 85.47, 48.87)),
                ("w256", "rerope{w256}", (49.41, 77.90, 48.48)),
                ("w256-log n†", "rerope{w256}+dagger", (49.41, 82.40, 48.85)),
                ("w256-log n", "rerope{w256}+logn", (49.40, 85.12, 49.07)),
                ("w384", "rerope{w384}", (49.41, 70.72, 48.15)),
                ("w384-log n†", "rerope{w384}+dagger", (49.41, 76.42, 48.31)),
                ("w384-log n", "rerope{w384}+logn", (49.40, 83.24, 48.62)),
                ("w512", "rerope{w512}", (49.41, 7.09, 8.25)),
                ("w512-log n†", "rerope{w512}+dagger", (49.41, 7.08, 8.25)),
                ("w512-log n", "rerope{w512}+logn", (49.40, 15.84, 10.83)),
            ),
            REPEATS,
        ),
    ),
    "rerope-leaky": (
        Published(
            "ReRoPE and Leaky ReRoPE, trained with log n",
            "rerope, third table",
            ACCURACIES,
            (
                ("ReRoPE-w128", "rerope{w128}+logn", (49.40, 85.47, 48.87)),
                ("Leaky-w128-k64", "leaky-rerope{w128}-k64+logn", (49.40, 85.29, 48.96)),
                ("Leaky-w128-k32", "leaky-rerope{w128}-k32+logn", (49.40, 85.31, 49.03)),
                ("Leaky-w128-k16", "leaky-rerope{w128}-k16+logn", (49.40, 85.15, 49.10)),
                ("Leaky-w128-k8", "leaky-rerope{w128}-k8+logn", (49.40, 80.00, 48.11)),
                ("ReRoPE-w256", "rerope{w256}+logn", (49.40, 85.12, 49.07)),
                ("Leaky-w256-k64", "leaky-rerope{w256}-k64+logn", (49.40, 84.60, 49.03)),
                ("Leaky-w256-k32", "leaky-rerope{w256}-k32+logn", (49.40, 84.30, 48.97)),
                ("Leaky-w256-k16", "leaky-rerope{w256}-k16+logn", (49.40, 83.59, 48.87)),
                ("Leaky-w256-k8", "leaky-rerope{w256}-k8+logn", (49.40, 69.80, 45.72)),
            ),
            REPEATS,
        ),
    ),
}

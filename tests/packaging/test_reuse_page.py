"""Tests that bench/results/reused shows the results in bench/results/real_model on reuse.

python tests/packaging/test_reuse_page.py     prints the table
"""

import json
from pathlib import Path
from statistics import fmean

from flashrope.lab.evaluation.statistics import half_interval

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results" / "real_model"
PAGE = ROOT / "bench" / "results" / "reused" / "README.md"


def read(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())


def words(change: float, interval: float, digits: int) -> str:
    return f"{change:+.{digits}f} ± {interval:.{digits}f}"


def prose() -> str:
    return " ".join(PAGE.read_text().split())


def in_row(cells: list[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def reuse_table() -> list[str]:
    """Returns a row for every way to make a prompt. A row has the results over both orders of the documents, the
    changes in each order, and the answers found."""
    results = [row for row in read("reuse.json")["results"] if row["kind"] == "all"]
    of = {(row["order"], row["way"], row.get("recomputed")): row for row in results}
    first, last = dict.fromkeys(row["order"] for row in results if row["order"] != "both")
    lines = []
    for order, way, again in of:
        if order != "both":
            continue
        both = of["both", way, again]
        cells = [way, "" if again is None else str(again), f"{both['log_probability']:.2f}"]
        for each in ("both", first, last):
            row = of[each, way, again]
            cells.append("" if again is None else words(row["change"], row["interval_95"], 2))
        lines.append(in_row([*cells, f"{both['found']} of {both['asked']}"]))
    return sorted(lines, key=lambda line: "full" not in line and 1 + ("behind" in line))


def reuse_words() -> list[str]:
    """Returns how much the log probability improves if the first tokens of each passage are computed again. Differences
    are paired by question."""

    def mean(row: dict, way: str, again: int) -> float:
        return fmean(
            each["log_probability"]
            for each in row["ways"]
            if each["way"] == way and each.get("recomputed", None) == again
        )

    found = []
    for way, again in (("alone", 4), ("behind the head", 16), ("behind the head", 64)):
        changes = [mean(row, way, again) - mean(row, way, 0) for row in read("reuse.json")["rows"]]
        found.append(f"{fmean(changes):.2f} ± {half_interval(changes):.2f}")
    return found


def test_the_table_of_the_page():
    page = PAGE.read_text()
    missing = [line for line in reuse_table() if line not in page]
    assert not missing, "\n".join(missing)


def test_the_command_and_the_device_stand_beside_the_table():
    page, found = prose(), read("reuse.json")
    assert found["command"].replace("python -m", "").strip() in page.replace("\\ ", "").replace("runs/smollm2/", "")
    assert found["machine"].split(",")[0] in page


def test_results_hold_their_rows():
    """The means in the file follow from its rows, and there are enough questions."""
    reuse = read("reuse.json")
    assert len(reuse["rows"]) >= 24
    full, alone = [], []
    for row in reuse["rows"]:
        full += [each["log_probability"] for each in row["ways"] if each["way"] == "full prefill"]
        alone += [each["log_probability"] for each in row["ways"] if each["way"] == "alone" and each["recomputed"] == 0]
    found = next(row for row in reuse["results"] if row["kind"] == "all" and row.get("recomputed") == 0)
    assert found["way"] == "alone" and abs(found["change"] - (sum(alone) - sum(full)) / len(full)) < 1e-9


if __name__ == "__main__":
    for each in (reuse_table, reuse_words):
        print("\n".join(each()), end="\n\n")

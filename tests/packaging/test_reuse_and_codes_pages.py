"""docs/decoding.md and docs/serving.md show what bench/results/real_model holds on reuse and on quantized caches.

python tests/packaging/test_reuse_and_codes_pages.py     prints the tables
"""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results" / "real_model"
SIZES = {  # bits of a number at head_dim 64, scales of 32 bits included: keys and values on average
    "int8": "8.5",
    "int4": "4.5",
    "int4 keys": "",
    "int4 values": "",
    "int4, groups of 32": "5",
    "int4 keys, groups of 32": "",
    "int8 keys, int4 values": "6.5",
    "int8 keys, int4 values, groups of 32": "6.75",
}


def read(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())


def words(change: float, interval: float, digits: int) -> str:
    return f"{change:+.{digits}f} ± {interval:.{digits}f}"


def reuse_table() -> list[str]:
    """A row for every way to make a prompt: both orders, then the changes of each, and the answers found."""
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
        lines.append(f"| {' | '.join(cells)} | {both['found']} of {both['asked']} |".replace("|  |", "| |"))
    return sorted(lines, key=lambda line: "full" not in line and 1 + ("behind" in line))


def codes_table() -> list[str]:
    """A row for every way to store keys and values."""
    results = read("codes.json")["results"]
    lines = []
    for way, bits in SIZES.items():
        cells = [words(found[way]["change"], found[way]["interval_95"], 4) for found in results.values()]
        lines.append(f"| {way} | {bits} | {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def agreement_words() -> list[str]:
    found = read("agreement.json")["mean"]
    return [f"{found['chunks']:.2f}", f"{found['rotated keys']:.2f}"]


@pytest.mark.parametrize("table", [reuse_table, codes_table])
def test_the_tables_of_decoding(table):
    page = (ROOT / "docs" / "decoding.md").read_text()
    missing = [line for line in table() if line not in page]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", ["reuse.json", "codes.json"])
def test_the_command_and_the_device_stand_beside_the_tables(name):
    page, found = " ".join((ROOT / "docs" / "decoding.md").read_text().split()), read(name)
    assert found["command"].replace("python -m", "").strip() in page.replace("\\ ", "").replace("runs/smollm2/", "")
    assert found["machine"].split(",")[0] in page


def test_what_serving_says_of_codes_that_are_written_in_two_ways():
    page = " ".join((ROOT / "docs" / "serving.md").read_text().split())
    for share in agreement_words():
        assert f"{share} of what rounding" in page or f"{share} of it" in page, share


def test_results_hold_their_rows():
    """Means follow from the rows, and there are enough questions and windows."""
    reuse, codes = read("reuse.json"), read("codes.json")
    assert len(reuse["rows"]) >= 24 and codes["windows"] >= 3
    for at, length in enumerate(codes["lengths"]):
        of = {(row["way"], row["window"]): row["losses"][at] for row in codes["rows"]}
        for way in SIZES:
            changes = [loss - of["float32", window] for (name, window), loss in of.items() if name == way]
            assert abs(codes["results"][str(length)][way]["change"] - sum(changes) / len(changes)) < 1e-9
    full, alone = [], []
    for row in reuse["rows"]:
        full += [each["log_probability"] for each in row["ways"] if each["way"] == "full prefill"]
        alone += [each["log_probability"] for each in row["ways"] if each["way"] == "alone" and each["recomputed"] == 0]
    found = next(row for row in reuse["results"] if row["kind"] == "all" and row.get("recomputed") == 0)
    assert found["way"] == "alone" and abs(found["change"] - (sum(alone) - sum(full)) / len(full)) < 1e-9


if __name__ == "__main__":
    for each in (reuse_table, codes_table, agreement_words):
        print("\n".join(each()), end="\n\n")

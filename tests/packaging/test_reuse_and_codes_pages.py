"""Tests that docs/reused and docs/quantized show the results in bench/results/real_model on reuse and quantized caches.

python tests/packaging/test_reuse_and_codes_pages.py     prints the tables
"""

import json
from pathlib import Path
from statistics import fmean

import pytest
from flashrope.evaluation.statistics import half_interval

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results" / "real_model"
# {way to store: bits per number at head_dim 64, including scales of 32 bits, on average over keys and values}
SIZES = {
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


def prose(page: str) -> str:
    return " ".join((ROOT / "docs" / f"{page}.md").read_text().split())


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


def codes_table() -> list[str]:
    """Returns a row for every way to store keys and values."""
    results = read("codes.json")["results"]
    lines = []
    for way, bits in SIZES.items():
        cells = [words(found[way]["change"], found[way]["interval_95"], 4) for found in results.values()]
        lines.append(in_row([way, bits, *cells]))
    return lines


def far_codes_table() -> list[str]:
    """Returns a row for every way that was measured beyond the training length."""
    found = read("codes-12288.json")["results"]["12288"]
    return [
        in_row([way, words(row["change"], row["interval_95"], 4)]) for way, row in found.items() if way != "float32"
    ]


def agreement_words() -> list[str]:
    found = read("agreement.json")["mean"]
    return [f"{found['other sums']:.2f}", f"{found['rotated keys']:.2f}"]


@pytest.mark.parametrize(
    ("table", "folder"), [(reuse_table, "reused"), (codes_table, "quantized"), (far_codes_table, "quantized")]
)
def test_the_tables_of_the_pages(table, folder):
    page = (ROOT / "docs" / folder / "README.md").read_text()
    missing = [line for line in table() if line not in page]
    assert not missing, "\n".join(missing)


def layers_words() -> list[str]:
    """Returns the cost of int4 keys by layer. The first figure is the cost in all layers at once. Then come costs of
    int4 keys in a single layer, summed over ten layers each. The last two are the highest cost of a single layer, and
    the index of that layer."""
    found = {way: row["change"] for way, row in read("layers.json")["results"]["512"].items()}
    layers = [found[f"int4 keys, layer {n}"] for n in range(30)]
    tens = [sum(layers[n : n + 10]) for n in (0, 10, 20)]
    return [f"{x:.2f}" for x in (found["int4 keys"], *tens, max(layers))] + [str(layers.index(max(layers)))]


def test_the_layers_that_int4_keys_lose_in():
    page = prose("quantized/README")
    whole, first, second, third, most, worst = layers_words()
    assert f"int4 keys cost {whole}. If" in page and f"the costs add up to {first} for layers 0 to 9" in page
    assert f"to {second} for 10 to 19 and to {third} for 20 to 29. The worst layer, {worst}, costs {most}" in page


def test_the_prose_of_reuse():
    page = prose("reused/README")
    won = reuse_words()
    assert f"If the first 4 tokens of each passage are computed again, this loss shrinks by {won[0]}" in page
    assert f"computing 16 tokens again gains {won[1]}, and computing 64 tokens again gains {won[2]}" in page
    both = [row for row in read("reuse.json")["results"] if (row["kind"], row["order"]) == ("all", "both")]
    full, alone = both[0], next(row for row in both if row["way"] == "alone")
    lost = f"prefilled alone lose {-alone['change']:.2f} nats, and {alone['found']} of {alone['asked']} answers"
    assert f"{lost} are found instead of {full['found']}" in page


@pytest.mark.parametrize(
    ("name", "folder"), [("reuse.json", "reused"), ("codes.json", "quantized"), ("codes-12288.json", "quantized")]
)
def test_the_command_and_the_device_stand_beside_the_tables(name, folder):
    page, found = prose(f"{folder}/README"), read(name)
    assert found["command"].replace("python -m", "").strip() in page.replace("\\ ", "").replace("runs/smollm2/", "")
    assert found["machine"].split(",")[0] in page


def test_the_numbers_that_decoding_repeats():
    decoding = prose("decoding")
    found = read("codes.json")["results"]["4096"]
    for way in ("int8", "int4"):
        assert words(found[way]["change"], found[way]["interval_95"], 4) in decoding
    rows = [row for row in read("reuse.json")["results"] if (row["kind"], row["order"]) == ("all", "both")]
    for way in ("alone", "behind the head"):
        row = next(row for row in rows if (row["way"], row.get("recomputed")) == (way, 0))
        change = f"{-row['change']:.2f} ± {row['interval_95']:.2f}"
        assert change in decoding and f"{row['found']} " in decoding


def test_what_is_said_of_codes_that_are_written_in_two_ways():
    page = prose("quantized/README")
    same, rotated = agreement_words()
    assert f"from those over `CodesCache`: by {same} of the change that rounding makes" in page
    assert f"differ by {rotated} of the change that rounding makes" in page
    found = read("agreement.json")["mean"]
    losses = [value for name, value in found.items() if name.startswith("loss")]
    assert len(losses) == 4 and max(losses) - min(losses) < 0.003


def test_results_hold_their_rows():
    """The means in the files follow from their rows, and the rows have enough questions and windows."""
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
    for each in (reuse_table, reuse_words, codes_table, far_codes_table, agreement_words):
        print("\n".join(each()), end="\n\n")

"""Tests the tables of docs/long_context.md, and how ``experiments fetch`` makes its texts from packages."""

import json

import pytest

pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")

from flashrope.console.options import BadInput

from experiments import long_context


def test_the_pages_hold_the_tables_of_the_results():
    for page, tables in long_context.tables_of(long_context.RESULTS).items():
        text = page.read_text()
        for name, expected in tables.items():
            begin, end = long_context.markers(name)
            assert text.split(begin)[1].split(end)[0].strip() == expected


def journal(path, rows):
    lines = [{"model": "m", "bin": 1024}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def row(scheme, bins, words="", window=0):
    return {"scheme": scheme, "words": words, "window": window, "how": "by position", "seconds": 1.0, "bins": bins}


def test_rows_are_paired_window_by_window(tmp_path):
    low, high = [1.0] * 16, [2.0] * 16
    journal(tmp_path / "positions-a.jsonl", [row("stock", low), row("ReRoPE, window 1,024", [0.5] * 16, "w")])
    journal(tmp_path / "positions-b.jsonl", [row("stock", high), row("ReRoPE", [1.75] * 16, "w"), row("NTK", [9] * 16)])
    journals = long_context.read(tmp_path)
    base, rerope, ntk = long_context.rows_of(journals)
    assert (base.scheme, rerope.scheme, ntk.scheme) == ("stock", "ReRoPE", "NTK")
    assert base.bins == (1.5,) * 16 and rerope.bins == (1.125,) * 16
    assert (rerope.windows, ntk.windows) == ((2, 2), (1, 1))
    assert sorted(rerope.changes) == [-0.5] * 8 + [-0.25] * 8
    lines = long_context.table(journals, long_context.COLUMNS).splitlines()
    assert lines[3].startswith("| ReRoPE | w | 2 | 1.125 |") and "| -0.375 ± 0.0" in lines[3]
    assert lines[2].startswith("| the model as it is |") and lines[2].endswith("|  |")
    for rows in journals:
        rows += [row("YaRN", [3.0] * 16)] + [row("ReRoPE, window 2,048", [0.5] * 16)]
    (axes,) = long_context.picture(journals).axes
    assert [line.get_ydata()[0] for line in axes.lines[:3]] == [1.5, 3.0, 0.5]
    (tmp_path / "positions-c.jsonl").write_text('{"bin": 256}\n')
    with pytest.raises(BadInput, match="expected means over 1024 positions, got 256"):
        long_context.read(tmp_path)


def test_numbers_found_by_scheme_and_length(tmp_path):
    cells = [
        {"scheme": scheme, "length": length, "depth": depth, "trials": 2, "found": found, "log_probability": log_p}
        | {"words": "w", "chosen": None}
        for scheme, length, depth, found, log_p in (
            ("ReRoPE", 4096, 0.0, 2, -0.5),
            ("ReRoPE", 4096, 1.0, 1, -1.0),
            ("stock", 4096, 0.0, 0, -17.0),
            ("ReRoPE", 8192, 0.0, 1, -0.75),
        )
    ]
    journal(tmp_path / "passkey-a.jsonl", cells[:2])
    journal(tmp_path / "passkey-b.jsonl", cells[2:])
    lines = long_context.retrieval_table(tmp_path).splitlines()
    assert "4,096 tokens: found" in lines[0] and "8,192 tokens: found" in lines[0] and len(lines) == 4
    assert lines[2] == "| the model as it is | w | 0 of 2 (0% to 66%) | -17.00 |  |  |"
    assert lines[3] == "| ReRoPE | w | 3 of 4 (30% to 95%) | -0.50 | 1 of 2 (9% to 91%) | -0.75 |"
    first, second = long_context.retrieval_picture(tmp_path).axes[:2]
    assert (first.get_title("left"), second.get_title("left")) == ("the model as it is", "ReRoPE, w")
    assert second.images[0].get_array().tolist() == [[1.0, 0.5], [0.5, None]]
    journal(tmp_path / "passkey-c.jsonl", [cells[0] | {"trials": 6, "found": 3, "log_probability": -2.5}])
    lines = long_context.retrieval_table(tmp_path).splitlines()
    assert lines[3] == "| ReRoPE | w | 6 of 10 (31% to 83%) | -2.00 | 1 of 2 (9% to 91%) | -0.75 |"
    (pooled,) = (cell for cell in long_context.retrieved(tmp_path) if cell["trials"] == 8)
    assert pooled["found"] == 5 and pooled["chosen"] is None


def test_losses_of_the_second_copy_by_scheme_and_length(tmp_path):
    for name, shift in (("a", 0.0), ("b", 1.0)):
        rows = [
            {"scheme": scheme, "context": context, "length": length, "windows": [loss + shift, loss + shift]}
            for scheme, context, length, loss in (
                ("ReRoPE", "copy", 2048, 1.0),
                ("ReRoPE", "copy", 4096, 2.0),
                ("ReRoPE", "text", 4096, 9.0),
                ("stock", "copy", 2048, 3.0),
            )
        ]
        (tmp_path / f"copied-{name}.json").write_text(json.dumps({"rows": rows}))
    half = long_context.half_interval([1.0, 1.0, 2.0, 2.0])
    assert long_context.copied_table(tmp_path).splitlines() == [
        "| scheme | windows | 2,048 tokens | 4,096 tokens |",
        "|---|---:|---:|---:|",
        f"| the model as it is | 4 | 3.500 ± {half:.3f} |  |",
        f"| ReRoPE | 4 | 1.500 ± {half:.3f} | 2.500 ± {half:.3f} |",
    ]


PAGE = """<html><head><title>T</title><style>p {}</style></head><body><h1>A head</h1><p>One <b>bold</b>
word.</p><pre>two
lines</pre><ul><li>item</li></ul></body></html>"""

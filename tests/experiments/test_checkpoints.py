"""Tests the experiment on the loss of checkpoints by length: what it reads from the files of ``flashrope loss``, and
what it judges."""

import json

from flashrope.schemes.catalogue import SCHEMES

from experiments import checkpoints
from experiments.checkpoints import COMMANDS, MEASURED, REPEATED, TEXT
from experiments.registry import EXPERIMENTS
from experiments.statistics import LOWER

LENGTH = 64


def written(path, value, commands=COMMANDS, left_out=()):
    """Writes and returns a loss.json as ``flashrope loss --repeat`` writes it. value: a function of scheme, context and
    length."""
    path.parent.mkdir(exist_ok=True)
    rows = [
        {"scheme": SCHEMES[name].label, "context": context, "length": length, "windows": value(name, context, length)}
        for name in commands
        for context in ("text", "repeated")
        for length in (LENGTH, 2 * LENGTH)
    ]
    record = {"facts": {}, "train_length": LENGTH, "targets": 32, "rows": rows}
    if left_out:  # older files do not have it
        record["left_out"] = {SCHEMES[name].label: "refused" for name in left_out}
    path.write_text(json.dumps(record))
    return path


def test_rows_are_means_over_windows(tmp_path):
    path = written(tmp_path / "loss.json", lambda name, context, length: [length, length + (context == "text")])
    found = checkpoints.rows_of(path, 3)
    assert len(found) == len(COMMANDS) * 3  # nothing is repeated at the training length
    by_place = {(row[0], row[4], row[5]): row for row in found}
    assert by_place["rerope-w32+dagger", TEXT, 128] == ["rerope-w32+dagger", "rope", 64, 3, TEXT, 128, 128.5, 2]
    assert by_place["leaky-rerope-w32-k30+dagger", REPEATED, 128][6] == 128.0
    assert by_place["self-extend-w32-g16", TEXT, 128][6] == 128.5
    assert ("rope", REPEATED, 64) not in by_place


def test_only_schemes_without_a_measurement_are_measured(tmp_path):
    def value(name, context, length):
        return [1.0]

    older = [name for name in COMMANDS if not name.startswith(("self-extend", "dual-chunk"))]
    newer = [name for name in COMMANDS if name not in older]
    assert checkpoints.measured(tmp_path, 1) == [] and checkpoints.unmeasured(tmp_path, 1) == list(COMMANDS)
    written(tmp_path / "s1" / "loss.json", value, older)
    written(tmp_path / "s10" / "loss.json", value, ["stock"])
    assert checkpoints.measured(tmp_path, 1) == [tmp_path / "s1" / "loss.json"]
    assert checkpoints.unmeasured(tmp_path, 1) == newer and checkpoints.unmeasured(tmp_path, 10) == list(COMMANDS)[1:]
    written(tmp_path / "s1-2" / "loss.json", value, ["self-extend"], left_out=["dual-chunk"])
    assert checkpoints.unmeasured(tmp_path, 1) == ["self-extend-log-n", "dual-chunk-log-n"]
    written(tmp_path / "s1-3" / "loss.json", value, newer[1::2])
    found = [path.parent.name for path in checkpoints.measured(tmp_path, 1)]
    assert found == ["s1", "s1-2", "s1-3"] and checkpoints.unmeasured(tmp_path, 1) == []


def test_the_use_of_far_context_is_judged_for_every_scheme():
    compares = EXPERIMENTS["loss"].compares
    repeats = [each for each in compares if (each.first[1], each.second[1]) == (REPEATED, TEXT)]
    assert {each.first[0] for each in repeats} == set(MEASURED) and len(repeats) == 3 * len(MEASURED)
    assert all(each.expected == LOWER and each.first[0] == each.second[0] for each in repeats)
    for each in compares:
        assert {each.first[0], each.second[0]} <= set(MEASURED)

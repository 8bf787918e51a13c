"""Tests the figures: a scheme always looks the same, a panel has at most eight lines, names do not overlap, and files
are small."""

import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from experiments import tables
from experiments.figures import DPI, MAX_LINES, WIDTH, Line, Panel, canvas, draw, name_ends, points
from experiments.looks import LOOKS, NAMES, family, label, look, scheme_of
from experiments.registry import EXPERIMENTS
from experiments.show import show
from experiments.statistics import interval


def row(scheme, seed, value, task="copying-by-length", at=256, train_length=128):
    fields = {"scheme": scheme, "task": task, "at": at, "seed": seed, "value": value, "train_length": train_length}
    return {name: str(value) for name, value in fields.items()}


def test_every_scheme_that_is_measured_has_a_name_and_a_look_of_its_own():
    assert len(set(LOOKS.values())) == len(LOOKS)
    for experiment in EXPERIMENTS.values():
        for template in experiment.schemes:
            name = family(tables.resolve(template, 128)[0])
            assert all(part in NAMES for part in name.split("+")), name
            base = name.partition("+logn")[0].partition("+dagger")[0]
            assert look(name) == LOOKS.get(name, LOOKS[base])


def test_names():
    assert family("hope+yarn-s2") == "hope+yarn" and family("rerope-w64+dagger") == "rerope+dagger"
    assert family("leaky-rerope-w128-k16+logn") == "leaky-rerope+logn" and family("p-rope-p0.75") == "p-rope"
    assert label("hope+yarn-s2.5") == "HoPE + YaRN" and label("rerope-w64+dagger", numbers=True) == "ReRoPE w64, log n†"
    assert scheme_of("RoPE") == "rope" and scheme_of("kerple") == "kerple" and scheme_of("pair 5") is None


def test_a_panel_has_at_most_eight_lines(tmp_path):
    rows = [row("rope", seed, 50 + seed, at=at) for seed in range(3) for at in (64, 128)]
    line = Line("rope", "copying-by-length")
    draw(tmp_path / "a.png", [Panel("one", [line], line)], rows, 128, "right (%)")
    image = imread(tmp_path / "a.png")
    assert image.shape[1] == round(WIDTH * DPI) and (tmp_path / "a.png").stat().st_size < 60_000
    with pytest.raises(ValueError, match="two: expected at most 8 lines, got 9"):
        draw(tmp_path / "b.png", [Panel("two", [line] * (MAX_LINES + 1))], rows, 128, "right (%)")


def test_no_panel_is_empty_and_no_line_crosses_a_name(tmp_path, monkeypatch):
    from experiments import figures

    drawn = []
    monkeypatch.setattr(figures, "finish", lambda figure, path: drawn.append(figure))
    rows = [row(scheme, 0, value, at=at) for scheme, value in (("rope", 50), ("hope", 60)) for at in (64, 128, 256)]
    lines = [Line(scheme, "copying-by-length") for scheme in ("rope", "hope")]
    draw(tmp_path / "a.png", [Panel(title, lines, lines[0]) for title in ("one", "two", "three")], rows, 128, "y")
    axes = drawn[0].axes
    assert len(axes) == 3 and all(each.get_visible() and each.lines for each in axes)
    drawn[0].canvas.draw()
    assert axes[2].get_window_extent().width > 1.8 * axes[0].get_window_extent().width
    for each in axes:
        (level,) = [lines for lines in each.collections if len(lines.get_linestyle()) and lines.get_zorder() == 0]
        assert max(point[0] for path in level.get_paths() for point in path.vertices) <= 256


def test_no_colour_twice_in_a_panel(tmp_path):
    rows = [row(scheme, 0, 50, at=at) for scheme in ("yarn-s8", "dual-chunk") for at in (64, 128)]
    lines = [Line(scheme, "copying-by-length") for scheme in ("yarn-s8", "dual-chunk")]
    with pytest.raises(ValueError, match="one: expected a colour for each scheme, got #009E73 for yarn-s8, dual-chunk"):
        draw(tmp_path / "a.png", [Panel("one", lines)], rows, 128, "right (%)")


def test_names_at_the_ends_do_not_overlap():
    figure, (axes,) = canvas(4)
    axes.set_ylim(0, 100)
    axes.set_xlim(0, 2)
    name_ends(axes, [(50.0, 1.0, "a", "k"), (50.2, 1.0, "b", "k"), (0.0, 1.0, "c", "k"), (49.9, 1.0, "d", "k")], False)
    figure.canvas.draw()
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: box.y0)
    assert len(boxes) == 4
    assert all(low.y1 <= high.y0 + 1 for low, high in zip(boxes, boxes[1:], strict=False))


def test_points(tmp_path):
    groups = {"one": {name: interval([1.0, 2.0, 3.0]) for name in ("rope", "rerope-w8")}}
    points(tmp_path / "points.png", groups, "right (%)", {"one": 5.0})
    assert imread(tmp_path / "points.png").shape[1] == round(WIDTH * DPI)


@pytest.mark.parametrize("name", ["zoo", "copying", "lengths", "passkey", "rerope-schemes"])
def test_every_experiment_is_drawn_and_tabled(name, tmp_path):
    """Figures and tables of every experiment can be made, here from made-up numbers. Each scheme of an experiment is in
    at least one of its figures."""
    experiment, unit = EXPERIMENTS[name], 64
    tasks = {
        "copying": ("copying-by-length", "copying-control"),
        "accuracy": ("accuracy-repeat", "accuracy-non-repeat"),
    }
    tasks["passkey"] = ("passkey", "passkey-digits")
    columns = [field for field in row("", 0, 0)]
    rows = []
    for template in dict.fromkeys(experiment.schemes):
        scheme, length = tables.resolve(template, unit)
        for task in (each for kind, _ in experiment.measures for each in tasks.get(kind, (kind,))):
            rows += [
                list(row(scheme, seed, 10 + seed, task, multiple * unit, length).values())
                for seed in (0, 1)
                for multiple in (1, 2, 8)
            ]
    (tmp_path / "results.csv").write_text("\n".join(",".join(line) for line in [columns, *rows]))
    text = show(tmp_path, name, unit)
    assert list(tmp_path.glob("*.png")) and "half of its 95% interval over 2 seeds" in text

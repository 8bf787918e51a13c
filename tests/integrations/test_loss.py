"""Tests flashrope loss: which tokens it measures, whether the loss equals a computation by hand, and the whole
command."""

import csv
import json
import math

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")

from families import schemes, tiny
from flashrope import Rotary
from flashrope.cli.main import main
from flashrope.console.options import BadInput
from flashrope.integrations.transformers import convert, revert
from flashrope.lab.evaluation import losses as loss
from flashrope.lab.evaluation.checkpoint import Tokens, check_causal, last_logits
from flashrope.lab.evaluation.losses import copied, measure, of_length, text_windows
from flashrope.lab.evaluation.readings import applicable
from flashrope.lab.evaluation.statistics import half_interval, student_t

pytestmark = pytest.mark.filterwarnings("error:.past_key_values. is deprecated")
BYTES = Tokens(lambda text: list(text.encode()), unit="byte")
SCHEMES = ["stock", "log-n", "ntk", "yarn", "rerope", "rerope-plain", "leaky", "hope", "cope"]
SCHEMES += ["p-rope", "string", "self-extend", "self-extend-log-n"]


# ---- which tokens


def test_longer_lengths_add_text_before_the_same_tokens():
    windows = [list(range(20)), list(range(100, 120))]
    assert of_length(windows, (), 19).tolist() == windows
    assert of_length(windows, (), 4).tolist() == [[15, 16, 17, 18, 19], [115, 116, 117, 118, 119]]
    assert of_length(windows, (7,), 4).tolist() == [[7, 16, 17, 18, 19], [7, 116, 117, 118, 119]]
    assert of_length(windows, (7,), 20).tolist() == [[7, *window] for window in windows]


def test_repeated_context_holds_only_the_shortest_length():
    windows = [list(range(20))]
    assert of_length(windows, (), 4, 4).tolist() == of_length(windows, (), 4).tolist()
    assert of_length(windows, (), 11, 4).tolist() == [[18, 19, 15, 16, 17, 18, 19, *[15, 16, 17, 18, 19]]]
    assert of_length(windows, (7,), 10, 4).tolist() == [[7, 18, 19, 16, 17, 18, 19, 16, 17, 18, 19]]


def test_a_passage_comes_again_at_the_end():
    windows = [list(range(40)), list(range(100, 140))]
    for start, length in (((), 40), ((7,), 20), ((), 11)):
        for row, window in zip(copied(windows, start, length, 6).tolist(), windows, strict=True):
            text = row[len(start) + 6 : -6]
            assert len(row) == length + 1 and tuple(row[: len(start)]) == start
            assert row[len(start) : len(start) + 6] == row[-6:] == window[:6]
            assert text == window[len(window) - len(text) :]


def test_windows_lie_in_one_file_and_do_not_overlap():
    texts = {"a": "".join(map(chr, range(32, 32 + 41))), "b": "".join(map(chr, range(80, 80 + 39)))}
    found = text_windows(texts, BYTES, 19, 100, 0)
    assert [window[0] for window in found] == [32, 52, 80]  # a second window of b would end one byte after the end of b
    assert all(window == list(range(window[0], window[0] + 20)) for window in found)
    assert len(text_windows(texts, BYTES, 19, 2, 0)) == 2
    with_start = Tokens(BYTES.encode, (1,))
    assert len(text_windows(texts, with_start, 20, 100, 0)) == 3  # the start token counts as one of the 20


# ---- the loss


def by_hand(model, inputs, targets):
    """Returns the mean loss of the last `targets` tokens of every row. Every token takes a full pass over the tokens
    before it."""
    found = []
    for row in inputs:
        total = 0.0
        for at in range(len(row) - targets, len(row)):
            logits = model(row[None, :at]).logits[0, -1].double()
            total -= math.log(float(torch.softmax(logits, 0)[row[at]]))
        found.append(total / targets)
    return found


@pytest.mark.parametrize(
    "family, changes",
    [("llama", None), ("llama", {"rerope": 8, "log_n": 16}), ("mistral", None), ("mistral", {})],
    ids=["stock", "rerope", "sliding window", "sliding window, converted"],
)
def test_the_loss_is_that_of_a_computation_by_hand(family, changes):
    torch.manual_seed(0)
    model = tiny(family).eval()
    if changes is not None:
        convert(model, **changes)
    inputs = of_length(torch.randint(64, (3, 41)).tolist(), (), 40)
    with torch.no_grad():
        expected = by_hand(model, inputs, 6)
    assert max(expected) - min(expected) > 0.03
    for options in ({}, {"batch": 2}, {"chunk": 7}, {"chunk": 5, "batch": 3}, {"chunk": 40}):
        assert list(measure(model, inputs, 6, **options)) == pytest.approx(expected, abs=2e-5), options


@pytest.mark.parametrize("changes", [{}, {"rerope": 8, "log_n": 16}], ids=["rope", "rerope"])
def test_the_loss_over_a_quantized_cache(changes):
    """Over a quantized cache, the size of the chunks hardly changes the loss. It changes the loss only where a number
    rounds to another quantized value."""
    torch.manual_seed(0)
    model = convert(tiny("llama").eval(), **changes)
    inputs = of_length(torch.randint(64, (3, 41)).tolist(), (), 40)
    plain = torch.tensor(list(measure(model, inputs, 6)))
    at_once = torch.tensor(list(measure(model, inputs, 6, cache_dtype="int8")))
    cost = (at_once - plain).abs().max()
    assert 1e-5 < cost < 0.02
    for options in ({"batch": 2}, {"chunk": 7}, {"chunk": 1, "batch": 3}):
        other = torch.tensor(list(measure(model, inputs, 6, cache_dtype="int8", **options)))
        assert (other - at_once).abs().max() < cost / 3, options


def test_the_command_with_a_quantized_cache(checkpoint, text, tmp_path):
    schemes = ["stock", "rerope", "self-extend"]
    sizes = ["--lengths", "16", "64", "--targets", "8", "--windows", "3", "--schemes", *schemes, "--chunk", "10"]

    def run(name, *options):
        assert main(command(checkpoint, text, tmp_path / name, *sizes, *options)) == 0
        return json.loads((tmp_path / name / "loss.json").read_text())

    plain = run("plain")
    assert "cache" not in plain["facts"]
    codes = run("int8", "--cache-dtype", "int8")
    assert codes["facts"]["cache"].startswith("int8")
    assert "stock: its own scheme, converted" in codes["facts"]["schemes"]
    assert len(codes["rows"]) == len(schemes) * 2
    for one, other in zip(plain["rows"], codes["rows"], strict=True):
        assert (one["scheme"], one["length"]) == (other["scheme"], other["length"])
        changes = [abs(a - b) for a, b in zip(one["windows"], other["windows"], strict=True)]
        assert 1e-6 < max(changes) < 0.005


def test_only_the_measured_logits_are_made():
    model = tiny("llama").eval()
    made = []
    model.lm_head.register_forward_hook(lambda module, args, out: made.append(out.shape[1]))
    list(measure(model, of_length([list(range(41))], (), 40), 6))
    assert made == [6]
    list(measure(model, of_length([list(range(41))], (), 40), 6, chunk=8))
    assert made[1:] == [1, 1, 1, 1, 6]


def test_a_model_that_makes_all_logits():
    model = tiny("llama").eval()
    ids = torch.randint(64, (2, 20))

    class Whole(torch.nn.Module):
        def forward(self, ids, use_cache):
            return model(ids, use_cache=use_cache)

    with torch.no_grad():
        torch.testing.assert_close(last_logits(Whole(), ids, 5), model(ids).logits[:, -5:])


def test_the_interval_is_students():
    for freedom, known in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (7, 2.3646), (30, 2.0423), (200, 1.9719)):
        assert student_t(freedom) == pytest.approx(known, abs=1e-4)
    values = [1.0, 2.0, 4.0]
    assert half_interval(values) == pytest.approx(4.3027 * 1.527525 / 3**0.5, abs=1e-3)
    assert math.isnan(half_interval([1.0]))


# ---- the command


def rows_of(folder) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "loss.csv").open()))


def command(checkpoint, text, out, *options):
    fixed = ["--device", "cpu", "--threads", "1", "--out", str(out)]
    return ["loss", "--model", str(checkpoint), "--text", str(text), *fixed, *options]


def test_the_command(checkpoint, text, tmp_path, capsys):
    sizes = ["--lengths", "64", "16", "128", "--targets", "8", "--windows", "4", "--repeat", "--schemes"]
    assert main(command(checkpoint, text, tmp_path, *sizes, *SCHEMES, "dual-chunk")) == 0
    shown = capsys.readouterr()
    words = " ".join(shown.out.split())
    for part in (
        "training length 32 tokens",
        "NTK: factor 4; YaRN: factor 4; ReRoPE: window 16, log n by 32; ReRoPE without log n: window 16; Leaky ReRoPE: "
        "factor 14, window 16",
        "HoPE: pairs with less than one turn over 32 tokens do not rotate",
        "Self-Extend: window 16, groups of 8; Self-Extend with log n: window 16, groups of 8, log n by 32",
        "left out: DCA: dual_chunk: expected a training length above 128",
        "the last 8 tokens of 4 windows, the same at every length, in nats per byte",
    ):
        assert part in words, part
    rows = rows_of(tmp_path)
    assert len(rows) == len(SCHEMES) * 2 * 3
    found = {(row["scheme"], row["context"], int(row["length"])): row for row in rows}
    for row in rows:
        assert row["windows"] == "4"
        if row["length"] == "16":
            assert float(row["change"]) == 0 and row["loss"] == found[row["scheme"], "text", 16]["loss"]
        else:
            change = float(row["loss"]) - float(found[row["scheme"], row["context"], 16]["loss"])
            assert float(row["change"]) == pytest.approx(change, abs=2e-6)
    assert len({row["loss"] for row in rows if row["context"] == "text" and row["length"] == "128"}) == len(SCHEMES)
    assert found["stock", "repeated", 128]["loss"] != found["stock", "text", 128]["loss"]
    saved = json.loads((tmp_path / "loss.json").read_text())
    assert list(saved["left_out"]) == ["DCA"] and len(saved["rows"]) == len(rows)
    assert (saved["train_length"], saved["targets"]) == (32, 8)
    for row in saved["rows"]:
        assert f"{sum(row['windows']) / 4:.4f} ± {half_interval(row['windows']):.4f}" in shown.out
    assert saved["facts"]["command"].startswith("flashrope loss --model")
    changes = shown.out[shown.out.index("change from 16 tokens") :]
    assert changes.count("0.0000 ± 0.0000") == len(SCHEMES) * 2
    first = {(row["scheme"], row["context"]): row["windows"] for row in saved["rows"] if row["length"] == 16}
    for row in saved["rows"]:
        change = [a - b for a, b in zip(row["windows"], first[row["scheme"], row["context"]], strict=True)]
        assert f"{sum(change) / 4:.4f} ± {half_interval(change):.4f}" in changes
    assert "ReRoPE, repeated, 128 tokens" in shown.err
    # Beyond the model's own length, the stock model of transformers is measured.
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    windows = text_windows({"": text.read_text()}, BYTES, 128, 4, 0)
    for length in (16, 128):
        with torch.no_grad():
            expected = by_hand(model, of_length(windows, (), length), 8)
        row = next(row for row in saved["rows"] if (row["scheme"], row["length"]) == ("stock", length))
        assert row["windows"] == pytest.approx(expected, abs=2e-5)


def test_the_command_with_copies(checkpoint, text, tmp_path, capsys):
    sizes = ["--lengths", "32", "64", "--windows", "3", "--schemes", "stock", "rerope", "--copy"]
    assert main(command(checkpoint, text, tmp_path, *sizes, "16")) == 0
    rows = json.loads((tmp_path / "loss.json").read_text())["rows"]
    found = {(row["scheme"], row["context"], row["length"]): row["windows"] for row in rows}
    assert len(found) == 8
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    windows = text_windows({"": text.read_text()}, BYTES, 64, 3, 0)
    for length in (32, 64):
        with torch.no_grad():
            expected = by_hand(model, copied(windows, (), length, 16), 15)
        assert found["stock", "copy", length] == pytest.approx(expected, abs=2e-5)
    assert main(command(checkpoint, text, tmp_path, *sizes, "17", "--overwrite")) == 2
    assert "--copy: expected 2 to 16 tokens, half the shortest length, got 17" in capsys.readouterr().err


def test_several_windows_and_a_scheme_of_ones_own(checkpoint, text, tmp_path, capsys):
    sizes = ["--lengths", "16", "32", "--windows", "2", "--schemes", "stock", "rerope", "--window", "8", "12"]
    own = Rotary.rope(16).rectify(9).text
    assert main(command(checkpoint, text, tmp_path, *sizes, "--rotary", own)) == 0
    rows = rows_of(tmp_path)
    names = ["stock", "ReRoPE, window 8", "ReRoPE, window 12", "own Rotary"]
    assert [row["scheme"] for row in rows] == [name for name in names for _ in range(2)]
    assert len({row["loss"] for row in rows[1::2]}) == 4
    assert "own Rotary: a scheme of your own" in capsys.readouterr().out


def test_a_tokenizer_and_its_start_token(checkpoint, text, tmp_path, monkeypatch):
    import tokenizers

    trainer = tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=["<s>"])
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.train_from_iterator([text.read_text()], trainer)
    words.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path / "with-tokenizer"
    transformers.AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>").save_pretrained(path)
    seen = []

    def recorded(model, inputs, *options):
        seen.extend(inputs.tolist())
        return measure(model, inputs, *options)

    monkeypatch.setattr(loss, "measure", recorded)
    out = tmp_path / "out"
    assert main(command(path, text, out, *["--lengths", "16", "32", "--windows", "3", "--schemes", "stock"])) == 0
    start = words.token_to_id("<s>")
    assert [len(row) for row in seen] == [17] * 3 + [33] * 3 and {row[0] for row in seen} == {start}
    for short, long in zip(seen[:3], seen[3:], strict=True):
        assert short[1:] == long[-16:] and start not in long[1:]
        assert words.decode(long[1:]).replace(" ", "") in text.read_text().replace(" ", "")
    assert "nats per token" in json.loads((out / "loss.json").read_text())["facts"]["measured"]


def test_a_family_that_cannot_be_converted_is_measured_as_it_is(text, tmp_path, capsys):
    gpt2().save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "out"
    run = command(tmp_path / "gpt2", text, out, "--windows", "2", "--schemes", "stock", "rerope", "--lengths")
    assert main([*run, "16", "32"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "left out: ReRoPE: model" in shown and "stock: the library's own attention" in shown
    assert [row["scheme"] for row in rows_of(out)] == ["stock"] * 2
    run.insert(1, "--overwrite")
    assert main([*run, "16", "33"]) == 2
    assert "--lengths: expected at most 32, because this model has a learned embedding" in capsys.readouterr().err
    run[run.index("stock")] = "yarn"
    assert main([*run, "16"]) == 2
    assert "--schemes: none of yarn, rerope fits this model" in capsys.readouterr().err


DYNAMIC = dict(rope_type="dynamic", factor=4.0, rope_theta=10_000.0)
BERT = dict(vocab_size=256, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
BYTES_OF = dict(vocab_size=256, max_position_embeddings=32)
GPT2 = dict(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=32)


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def bert():
    """Returns a model that sees the tokens that it predicts."""
    torch.manual_seed(0)
    return transformers.BertLMHeadModel(transformers.BertConfig(**BERT, initializer_range=0.3))


REFUSED = {
    "no tokenizer": (lambda: tiny("llama", vocab_size=4096), [],
                     "has no tokenizer, and its vocabulary is too large for bytes ("),
    "not causal": (bert, [], "--model: expected a causal language model"),
    "a table by length": (lambda: tiny("llama", **BYTES_OF, rope_scaling=DYNAMIC),
                          ["--chunk", "16", "--lengths", "16", "64"],
                          "--chunk: expected a model whose rotary table does not depend on the length"),
    "int8 of width 12": (
        lambda: tiny("llama", **BYTES_OF, hidden_size=48, num_attention_heads=4, head_dim=12),
        ["--cache-dtype", "int8"], "head_dim is a multiple of 8 for int8, got 12",
    ),
    "int8 of GPT-2": (gpt2, ["--cache-dtype", "int8"], "expected a model that convert supports"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_refused(case, text, tmp_path, capsys):
    make, options, message = REFUSED[case]
    make().save_pretrained(tmp_path / "model")
    run = command(tmp_path / "model", text, tmp_path / "out", "--lengths", "16", "--schemes", "stock")
    assert main([*run, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and (not options or f"{options[0]}: expected" in error)


def test_a_causal_model_is_not_refused(text, tmp_path):
    check_causal(tiny("llama").eval(), "llama")
    tiny("llama", **BYTES_OF, rope_scaling=DYNAMIC).save_pretrained(tmp_path / "dynamic")
    run = command(tmp_path / "dynamic", text, tmp_path / "out", "--lengths", "16", "64", "--schemes", "stock")
    assert main([*run, "--chunk", "64", "--windows", "2"]) == 0  # one piece


@pytest.mark.parametrize(
    "options, message",
    [
        (["--lengths", "16", "1000"], "--text: expected a file of at least 1,001 bytes"),
        (["--lengths", "16", "--targets", "17"], "--targets: expected at most 16, the shortest length, got 17"),
        (["--lengths", "1"], "--lengths: expected at least 2, got 1"),
        (["--text", "nowhere/at/all"], "nowhere/at/all: no such file or folder"),
        (["--model", "nowhere/at/all"], "--model: "),
        (["--out", __file__], "--out: cannot write to"),
    ],
)
def test_bad_input_is_one_line(checkpoint, text, tmp_path, capsys, options, message):
    assert main(command(checkpoint, text, tmp_path / "out", *options)) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.splitlines()[-1].startswith("flashrope loss: error: ")
    assert not list(tmp_path.iterdir())


def test_results_are_not_overwritten_in_silence(checkpoint, text, tmp_path, capsys):
    run = command(checkpoint, text, tmp_path, "--lengths", "16", "32", "--windows", "2", "--schemes", "stock")
    assert main(run) == 0
    assert {each.name for each in tmp_path.iterdir()} == {
        f"loss.{kind}" for kind in ("png", "svg", "pdf", "csv", "json")
    }
    (tmp_path / "loss.csv").write_text("the first run's")
    assert main(run) == 2
    assert "--out: expected a folder without results, got" in capsys.readouterr().err
    assert (tmp_path / "loss.csv").read_text() == "the first run's"
    assert main([*run, "--overwrite"]) == 0
    assert (tmp_path / "loss.csv").read_text().startswith("scheme,")


# ---- rows of saved models, and of schemes of one's own


def labels(model, names, *args, **options):
    found, skipped = applicable(model, names, 32, 128, *args, **options)
    return {scheme.label: scheme for scheme in found}, skipped


def test_rows_that_are_the_same_are_dropped():
    found, skipped = labels(tiny("llama", max_position_embeddings=128), ["stock", "ntk", "yarn", "rerope"])
    assert "NTK" in found
    found, skipped = applicable(tiny("llama"), ["stock", "ntk", "rerope"], 64, 64)  # NTK's factor is 1 here
    assert [scheme.label for scheme in found] == ["stock", "ReRoPE"]
    assert skipped == {"NTK": "the same scheme as stock"}


def test_schemes_of_ones_own(tmp_path):
    rotary = Rotary.rope(16).interpolate(4.0)
    (tmp_path / "halved.json").write_text(Rotary.rope(16).interpolate(2.0).text + "\n")
    convert(tiny("llama"), rerope=6, log_n=12).save_pretrained(tmp_path / "saved")
    model = tiny("llama")
    given = [rotary.text, str(tmp_path / "halved.json"), str(tmp_path / "saved"), Rotary.rope(16).ntk(2.0).text]
    found, skipped = labels(model, ["stock"], given=given)
    assert list(found) == ["stock", "own Rotary", "halved", "saved: ReRoPE w 6, log n", "own Rotary (2)"]
    expected = [None, rotary, Rotary.rope(16).interpolate(2.0), Rotary.rope(16).rectify(6).log_n(12)]
    for scheme, each in zip(found.values(), expected, strict=False):
        scheme.apply()
        assert not skipped and schemes(model) == ([each] * 3 if each else [])
    for wrong, message in (
        ("nowhere", "--rotary: expected the text of a Rotary, a file with it, or the folder .* got 'nowhere'"),
        ("{}", "--rotary: text: expected a JSON object with head_dim"),
        (Rotary.rope(64).text, "--rotary: own Rotary: rotary: expected head_dim 16 of layer 0, got 64"),
    ):
        with pytest.raises(BadInput, match=message):
            labels(tiny("llama"), ["stock"], given=[wrong])


def test_the_stock_model_is_what_the_schemes_leave():
    model = tiny("llama").eval()
    ids = torch.randint(64, (1, 40))
    with torch.no_grad():
        stock = model(ids).logits
        schemes, skipped = applicable(model, SCHEMES, 16, 40)
        assert not skipped and [scheme.name for scheme in schemes] == SCHEMES
        assert torch.equal(model(ids).logits, stock)
        seen = []
        for scheme in schemes:
            scheme.apply()
            seen.append(model(ids).logits)
        assert all((seen[0] - other).abs().max() > 1e-3 for other in seen[1:])
        revert(model)
        schemes[0].apply()
        assert torch.equal(model(ids).logits, stock) and torch.equal(seen[0], stock)


def test_the_numbers_of_self_extend_and_dual_chunk_attention():
    model, names = tiny("llama").eval(), ["self-extend", "dual-chunk", "dual-chunk-log-n"]
    schemes, _ = applicable(model, names, 256, 2048)
    assert [(scheme.label, scheme.words) for scheme in schemes] == [
        ("Self-Extend", "window 128, groups of 16"),
        ("DCA", "chunk size 256, local size 128"),
        ("DCA with log n", "chunk size 256, local size 128, log n by 256"),
    ]
    schemes[1].apply()
    assert model.config.flashrope == {"dual_chunk": (256, 128)}
    schemes[2].apply()
    assert model.config.flashrope == {"dual_chunk": (256, 128), "log_n": 256}
    _, skipped = applicable(model, ["stock", *names], 16, 2048, [7, 8])
    assert skipped["Self-Extend, window 7"] == (
        "self_extend: no group that divides window 7 brings 2048 tokens within the training length 16; the largest "
        "group, 7, leaves a distance of 298"
    )
    assert set(skipped) == {"Self-Extend, window 7", "Self-Extend, window 8", "DCA", "DCA with log n"}

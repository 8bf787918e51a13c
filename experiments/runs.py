"""Manages a run directory: one configuration, its trained models, and the measurements on them. Existing files are
kept.

settings.json                       the configuration of everything in the directory
split.json                          which files were trained on and which were not
models/<encoding>-L<length>-s<seed>.safetensors     and .losses.csv; .state during training
models/tokenizer.json               the tokenizer, if the models read tokens
tensorboard/<encoding>-L<length>-s<seed>/           with --tensorboard
<experiment>/training.csv, training.png             the training curves of its models
<experiment>/cells/*.json           one per scheme, training length and seed
<experiment>/results.csv, results.json, *.png, table.md
"""

from __future__ import annotations

import csv
import dataclasses
import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from flashrope import __version__
from flashrope.console import files
from flashrope.console.hardware import hardware
from flashrope.console.options import BadInput
from flashrope.lab.small_models import data
from flashrope.lab.small_models.train import Ranks
from flashrope.lab.small_models.workers import Workers

from .presets import Preset
from .tokens import TokenCorpus
from .zoo import Defaults

LONGEST = 32  # longest window in training lengths of the preset; one value, so that all experiments share one split


@dataclasses.dataclass(frozen=True)
class Run:
    """Describes a run: a preset on a text, in a directory."""

    out: Path
    preset: Preset
    preset_name: str
    corpus: data.Corpus | TokenCorpus | None  # None: the models read no text
    device: torch.device
    impl: str | None
    processes: int  # 0: jobs run in this process, one after the other
    threads: int  # number of CPU threads of each process
    first_seed: int = 0
    listed: tuple[int, ...] = ()  # all seeds, first_seed included, if they were named one by one
    window: int | None = None  # window of schemes that name no window; None: half the training length
    compile: bool = False
    tensorboard: bool = False
    devices: tuple[torch.device, ...] = ()  # one for each process; empty: all processes use ``device``
    ranks: Ranks = Ranks()  # the processes that train one model together

    @property
    def defaults(self) -> Defaults:
        return Defaults(window=self.window, base=self.preset.base)

    @property
    def seeds(self) -> tuple[int, ...]:
        listed = self.listed or range(self.first_seed, self.first_seed + self.preset.seeds)
        return tuple(listed[: self.preset.seeds])

    @property
    def unit(self) -> int:
        return self.preset.train_length

    @property
    def text(self) -> str:
        """Returns a description of the text that the models read."""
        if not self.corpus:
            return "none: the models are trained only on the task"
        what = "tokens" if isinstance(self.corpus, TokenCorpus) else "bytes"
        unseen = sum(map(len, self.corpus.unseen))
        return f"{self.corpus.name}; {len(self.corpus.train):,} {what} to train on, {unseen:,} unseen"

    def model_path(self, trained: str, length: int, seed: int) -> Path:
        return self.out / "models" / f"{trained}-L{length}-s{seed}.safetensors"

    def identity(self) -> dict:
        """Returns the configuration that must be the same each time the directory is used."""
        text = None
        if self.corpus:
            record = self.corpus.record()
            text = {"name": record["text"], **{part: record[part]["sha256"] for part in ("train", "unseen")}}
            if "vocab_size" in record:
                text["vocab_size"] = record["vocab_size"]
        sizes = {
            key: value for key, value in dataclasses.asdict(self.preset).items() if key not in ("seeds", "schemes")
        }
        changed = {"window": self.window, "compile": self.compile or None}
        return {
            "preset": self.preset_name,
            **sizes,
            **{key: value for key, value in changed.items() if value is not None},
            "text": text,
            "device": self.device.type,
        }

    def open(self) -> None:
        """Creates the directory, or checks that it has this configuration. Raises BadInput."""
        path, identity = self.out / "settings.json", self.identity()
        try:
            if path.exists():
                existing = json.loads(path.read_text(encoding="utf-8"))
                differences = [
                    f"{key} is {existing.get(key)!r}, not {identity.get(key)!r}"
                    for key in {**existing, **identity}
                    if existing.get(key) != identity.get(key)
                ]
                if differences:
                    raise BadInput(
                        f"--out: {self.out} has another configuration ({'; '.join(differences)}); choose another "
                        "directory"
                    )
                return
            if self.out.exists() and any(self.out.iterdir()):
                raise BadInput(f"--out: {self.out} has other files and no settings.json; choose another directory")
            (self.out / "models").mkdir(parents=True, exist_ok=True)
            if self.corpus:
                files.write(self.out / "split.json", json.dumps(self.corpus.record(), indent=1))
            if isinstance(self.corpus, TokenCorpus) and self.corpus.tokenizer:
                shutil.copy(self.corpus.tokenizer, self.out / "models" / "tokenizer.json")
            files.write(path, json.dumps(identity, indent=1))
        except json.JSONDecodeError:
            raise BadInput(f"--out: {path} is not JSON; choose another directory") from None
        except OSError as error:
            raise BadInput(f"--out: cannot write to {self.out} ({error.strerror})") from None

    def provenance(self) -> dict:
        """Returns configuration, revision, hardware and versions, for results.json."""
        return {
            "settings": self.identity(),
            "seeds": list(self.seeds),
            "revision": revision(),
            "hardware": hardware(self.device),
            "impl": self.impl,
            "processes": self.ranks.world if self.ranks.world > 1 else max(self.processes, 1),
            "flashrope": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def workers(self) -> Workers:
        return Workers(self.processes, self.threads, self.devices)


def revision() -> str:
    """Returns the commit of the checkout, with -dirty if files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def in_units(text: str, folder: Path) -> str:
    """Returns the text. If the run of the experiment in ``folder`` read tokens, "byte" is replaced by "token"."""
    settings = folder.parent / "settings.json"
    read = json.loads(settings.read_text(encoding="utf-8")).get("text") if settings.exists() else None
    return text.replace("byte", "token") if read and "vocab_size" in read else text


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
    shown = ([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
    files.write(path, files.csv_text(columns, shown))


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))

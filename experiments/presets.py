"""Defines the presets: named sizes of a run."""

from __future__ import annotations

import dataclasses

from flashrope.lab.small_models.model import ModelConfig
from flashrope.lab.small_models.train import TrainConfig

from . import copying

# Kinds of data to train models on. A model is trained either on text only or on one task only.
TEXT, COPYING, FEW_SHOT, PASSKEY = "text", "copying", "few-shot", "passkey"
WITHOUT_TEXT = (COPYING,)  # all other data needs text files


@dataclasses.dataclass(frozen=True)
class Preset:
    """Holds the sizes of one run. Lengths are in bytes.

    Attributes:
        batch: windows of ``train_length`` per step.
        samples: number of unseen samples in every measurement.
        seeds: number of models per encoding.
        data: what the models are trained on: TEXT, COPYING, FEW_SHOT or PASSKEY, never a mixture.
        base: base of the rotary frequencies.
        vocab_size: size of the vocabulary. Models that read text byte by byte have 256.
        architecture: "llama" or "gau" (gau.py).
        schemes: the schemes that the experiment perplexity measures. Empty: the experiment's default schemes.
    """

    width: int
    layers: int
    heads: int
    train_length: int
    batch: int
    steps: int
    learning_rate: float
    warmup: float
    samples: int
    seeds: int
    mlp_width: int = 0
    micro_batch: int = 0
    beta2: float = 0.95
    data: str = TEXT
    base: float = 10_000.0
    vocab_size: int = 256
    architecture: str = "llama"
    schemes: tuple[str, ...] = ()

    @property
    def reads_text(self) -> bool:
        return self.data not in WITHOUT_TEXT

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(self.width, self.layers, self.heads, self.mlp_width, self.vocab_size)

    def training(self, length: int, seed: int) -> TrainConfig:
        """Returns the settings for training a model at this length. A step has as many bytes as at the preset's
        training length."""
        batch = max(self.batch * self.train_length // length, 1)
        micro = max(self.micro_batch * self.train_length // length, 1) if self.micro_batch else 0
        return TrainConfig(
            self.steps,
            batch,
            length,
            self.learning_rate,
            warmup=self.warmup,
            betas=(0.9, self.beta2),
            seed=seed,
            micro_batch=micro,
        )


CPU = Preset(
    width=64,
    layers=2,
    heads=2,
    train_length=64,
    batch=16,
    steps=1200,
    learning_rate=5e-3,
    warmup=0.1,
    samples=200,
    seeds=5,
)
# Models of a task have a smaller base: their slowest pair makes one turn in about 7 training lengths.
PRESETS = {
    "tiny": dataclasses.replace(CPU, steps=500, samples=32, seeds=1),
    "cpu": CPU,
    # This is the architecture in ReRoPE's tables. Two gated attention units are about as large as one Llama layer.
    "gau": dataclasses.replace(CPU, layers=4, steps=1600, architecture="gau"),
    "copying": Preset(
        width=64,
        layers=2,
        heads=2,
        train_length=128,
        batch=32,
        steps=1500,
        learning_rate=4e-3,
        warmup=0.05,
        samples=200,
        seeds=5,
        beta2=0.98,
        data=COPYING,
        base=200.0,
        vocab_size=copying.LETTERS,
    ),
    "loss": Preset(
        width=128,
        layers=2,
        heads=4,
        train_length=256,
        batch=8,
        steps=800,
        learning_rate=4e-3,
        warmup=0.05,
        samples=16,
        seeds=8,
        beta2=0.98,
    ),
    "few-shot": Preset(
        width=64,
        layers=2,
        heads=2,
        train_length=288,
        batch=14,
        steps=1000,
        learning_rate=4e-3,
        warmup=0.05,
        samples=100,
        seeds=5,
        beta2=0.98,
        data=FEW_SHOT,
        base=500.0,
    ),
    "passkey": Preset(
        width=64,
        layers=2,
        heads=2,
        train_length=64,
        batch=64,
        steps=1600,
        learning_rate=4e-3,
        warmup=0.05,
        samples=200,
        seeds=5,
        beta2=0.98,
        data=PASSKEY,
        base=100.0,
    ),
    # Every model reads 100 million bytes. Six encodings are trained: rope, rope+logn, hope, alibi, kerple and nope.
    "small": Preset(
        width=256,
        layers=4,
        heads=4,
        train_length=512,
        batch=64,
        steps=3052,
        learning_rate=1e-3,
        warmup=0.05,
        samples=200,
        seeds=3,
        schemes=(
            "rope",
            "yarn-s8",
            "rerope{w256}",
            "rerope{w256}+dagger",
            "rerope{w256}+logn",
            "hope",
            "hope+yarn-s8",
            "alibi",
            "kerple",
            "nope",
        ),
    ),
    # The sizes are those of HoPE's appendix A, with bytes instead of 32,000 tokens and bfloat16 instead of float16.
    "125m": Preset(
        width=768,
        layers=12,
        heads=12,
        train_length=512,
        batch=512,
        steps=50_000,
        learning_rate=3e-4,
        warmup=0.04,
        samples=1000,
        seeds=3,
        mlp_width=2688,
        micro_batch=64,
        beta2=0.999,
    ),
}

"""Records the losses of SmolLM2-135M on text.txt that test_smollm2.py expects. After a change that is meant to change
the losses, run

FLASHROPE_REAL_MODEL=FILE.gguf python tests/integrations/real_model/recorded.py
"""

import json
import os
import sys
from pathlib import Path

import torch
from flashrope.lab.evaluation.by_position import position_losses
from flashrope.lab.evaluation.readings import applicable
from flashrope.schemes.catalogue import SCHEMES

HERE = Path(__file__).parent
FILE = HERE / "losses.json"
LENGTH = 1024
# The model's own training length is much larger. With this one, every scheme changes something within 1,024 tokens.
TRAIN_LENGTH, WINDOW = 512, 128


def row(tokens) -> torch.Tensor:
    ids = [*tokens.start, *tokens.encode((HERE / "text.txt").read_text(encoding="utf-8"))]
    return torch.tensor(ids[: LENGTH + 1])


def losses(model, tokens) -> dict[str, float]:
    """Returns {scheme of the catalogue: mean loss of the last half of the tokens, in nats per token}."""
    found = {}
    schemes, skipped = applicable(model, list(SCHEMES), TRAIN_LENGTH, LENGTH, [WINDOW])
    for scheme in schemes:
        scheme.apply()
        found[scheme.label] = float(position_losses(model, row(tokens))[LENGTH // 2 :].mean())
    return found | dict.fromkeys(skipped, float("nan"))


if __name__ == "__main__":
    from flashrope.lab.evaluation.checkpoint import load

    measured = losses(*load(os.environ["FLASHROPE_REAL_MODEL"], torch.device("cpu")))
    FILE.write_text(json.dumps({name: round(loss, 4) for name, loss in measured.items()}, indent=1) + "\n")
    sys.exit(print(FILE.read_text()))

"""``python -m flashrope.integrations.torchtitan.export FOLDER ARGUMENTS``: the config.json of exported weights.

FOLDER holds what torchtitan wrote with ``--checkpoint.last_save_in_hf``; ARGUMENTS are those of the training.
"""

from __future__ import annotations

import sys

from torchtitan.config import ConfigManager
from torchtitan.config.override import apply_overrides

from .hugging_face import save_config


def main(arguments: list[str]) -> None:
    """
    Raises:
        SystemExit: no folder is given.
        ValueError: as ``save_config``, and those of the overrides.
    """
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit("expected the folder of the exported weights, then the arguments of the training")
    folder, *rest = arguments
    config = ConfigManager().parse_args(rest)
    model = config.model_spec.model
    model.update_from_config(config=config)
    apply_overrides(config.override, config)
    save_config(model, folder)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Writes docs/experiments/README.md from the results in that folder and experiments/templates/page.md.

python tools/experiments_page.py [RUN_DIRECTORY ...]     with the results of these runs of python -m experiments
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments import page  # noqa: E402


def main() -> None:
    for run in sys.argv[1:]:
        print(f"{run}: {', '.join(page.publish(Path(run))) or 'nothing'}")
    page.redraw()
    page.write()


if __name__ == "__main__":
    main()

"""Makes a model and a text for the commands that measure models."""

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """Returns the folder of a random model of 2 layers and 32 tokens that reads bytes."""
    from small_models import tiny

    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny("llama", vocab_size=256, max_position_embeddings=32, num_hidden_layers=2).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Returns a file of 1,000 bytes."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(100))[:1000])
    return path

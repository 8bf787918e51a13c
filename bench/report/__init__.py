"""The records of a run, and the figures drawn from them."""

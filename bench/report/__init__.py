"""What is kept of a run, and what is drawn from it."""

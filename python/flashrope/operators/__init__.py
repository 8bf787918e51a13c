"""The public calls, the checks of their arguments, and the ``torch.library`` operators that they use."""

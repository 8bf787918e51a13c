"""Perturbs every training by rounding errors only, to show that no test depends on them: ``pytest --perturb-training
SEED``."""

import functools

import torch
from flashrope.lab.small_models import workers

_serve = workers._serve


def perturb(seed: int) -> None:
    """Makes every new optimizer change its weights by one unit in the last place, up or down at random. This applies to
    this process and to workers of flashrope.small_models."""
    init = torch.optim.Optimizer.__init__

    def perturbed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in (weight for group in self.param_groups for weight in group["params"]):
                sign = torch.randint(2, weight.shape, generator=generator).to(weight) * 2 - 1
                weight.mul_(1 + torch.finfo(weight.dtype).eps * sign)

    torch.optim.Optimizer.__init__ = perturbed
    workers._serve = functools.partial(_serve_perturbed, seed)


def _serve_perturbed(seed: int, *arguments) -> None:
    perturb(seed)
    _serve(*arguments)

"""The mutants, a file for each area."""

from ..breaks import mutants_of
from . import (
    backward,
    caches,
    cpu,
    cuda,
    decode,
    forward,
    integrations,
    launches,
    maps,
    rotate,
    rotation,
    scales,
    schemes,
    softmax,
    tables,
    tiles,
)

AREAS = (
    *(schemes, tables, scales, launches),
    *(tiles, softmax, rotation, rotate, forward, backward, decode),
    *(maps, cpu, cuda, caches, integrations),
)
MUTANTS = mutants_of(tuple(group for area in AREAS for group in area.GROUPS))

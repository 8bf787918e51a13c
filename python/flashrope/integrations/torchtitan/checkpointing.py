"""Selective activation checkpointing that keeps what this package's attention returns."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.distributed.activation_checkpoint import SelectiveAC

from ...operators.library import OPERATORS


class SavesAttention(SelectiveAC):
    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {OPERATORS.attention.default}

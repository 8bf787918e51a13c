"""The plans of this process, and whether this package's backend is in its place."""

from __future__ import annotations

from ..options import FIELD
from .plan import BACKEND, Plan, asked, make_plan

BACKEND_PATH = "flashrope.integrations.vllm.backend.FlashropeBackend"

_plans: dict[str, Plan] = {}  # by digest


def remember(plan: Plan) -> None:
    _plans[plan.digest] = plan


def active_plan(config) -> Plan | None:
    """The plan of a VllmConfig that was checked, in this process or in the one that sent it; None: stock vLLM."""
    if config is None or config.model_config is None or not asked(config):
        return None
    digest = digest_of(config)
    if digest is None:
        raise RuntimeError(
            "flashrope: expected a configuration that was checked when it was made, got one that was not"
        )
    if digest not in _plans:
        plan = make_plan(config)
        if plan.digest != digest:
            raise RuntimeError("flashrope: expected the scheme that the configuration was checked for, got another one")
        _plans[digest] = plan
    return _plans[digest]


def check_backend() -> None:
    """
    Raises:
        RuntimeError: another plugin has taken vLLM's CUSTOM, so keys that are not rotated would go to its attention.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum[BACKEND].get_path()
    if path != BACKEND_PATH:
        raise RuntimeError(f"attention_backend: expected {BACKEND} to be {BACKEND_PATH}, got {path} of another plugin")


def digest_of(config) -> str | None:
    additional = getattr(config, "additional_config", None)
    return additional.get(FIELD) if isinstance(additional, dict) else None

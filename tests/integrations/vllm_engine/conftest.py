"""The tests in this folder run vLLM itself. .ci/run installs it in a separate environment. Without vLLM the tests are
not collected."""

import os
from importlib.util import find_spec

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the test's process
}

if find_spec("vllm") is not None:
    os.environ.update(ENVIRONMENT)
    os.environ.pop("TRITON_INTERPRET", None)  # vLLM's own kernels have no interpreter


def pytest_report_header():
    return None if find_spec("vllm") else "vllm is not installed: tests/integrations/vllm_engine is skipped"

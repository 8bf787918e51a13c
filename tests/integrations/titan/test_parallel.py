"""Tests that the override gives the results of stock torchtitan in two processes, under FSDP and under tensor
parallelism."""

import pytest
import torch
import trainings

# torchtitan's other backends, spmd_types (the default) and full_dtensor, need a newer torch: under torch 2.13
# their fully_shard refuses the parameters.
DTENSOR = {"spmd_backend": "partial_dtensor"}
TP = DTENSOR | {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}
LAYOUTS = {
    "fsdp": DTENSOR | {"data_parallel_shard_degree": 2},
    "tp": TP,
    "tp, no sequence parallelism": TP | {"enable_sequence_parallel": False},
}


@pytest.mark.parametrize("family, layout", [*(("llama3", layout) for layout in LAYOUTS), ("qwen3", "tp")])
def test_two_processes(two_ranks, family, layout):
    fields = {"parallelism": LAYOUTS[layout], "training": trainings.FLOAT64}
    ours, stock = (two_ranks(trainings.first_on_rank, family, given, fields) for given in ({"scheme": "stock"}, None))
    if "tp" in layout:  # both ranks read the batch that one process reads
        alone = trainings.first_step(trainings.settings(family, {"scheme": "stock"}, 1, training=trainings.FLOAT64))[0]
        assert ours[0][0] == pytest.approx(alone, rel=1e-12)
    for (loss, grads), (want, exact) in zip(ours, stock, strict=True):
        assert loss == pytest.approx(want, rel=1e-12)
        assert grads.keys() == exact.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, exact[name], rtol=1e-9, atol=1e-11, msg=name)

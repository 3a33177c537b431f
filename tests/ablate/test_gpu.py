"""The same small ablation on a GPU: every kind of cell, with the numbers of the CPU."""

from contextlib import contextmanager

import pytest

from quantmla.ablate.run import run_ablation
from quantmla.evaluate.model import Settings

CELLS = [
    "c2r4/rtn/*",
    "c4r4/flatquant/policy",
    "c4r4/smoothquant_tuned/policy",
    "c4r4/quarot_online/bare",
    "c4-kivi4/rtn/*",
    "hqq4/rtn/policy",
    "nvfp4/rtn/policy",
    "book4/*/policy",
    "norm2-r4/quarot_online/policy",
]


@contextmanager
def silent(title):
    yield lambda what, done, total: None


@pytest.mark.gpu
def test_numbers_are_those_of_the_cpu(ablation, tmp_path):
    results = []
    for device in ("cpu", "cuda"):
        settings = Settings(dtype="float32", device=device, chunk_tokens=64, batch=2)
        small = ablation(tmp_path / device, CELLS, gate=1e9)
        result = run_ablation(small, settings, resume=False, say=lambda line: None, progress=silent)
        results.append({row["cell"]: row for row in result["ablation"]["rows"]})
    cpu, gpu = results
    assert set(cpu) == set(gpu)
    for name, row in gpu.items():
        assert row["valid"], name
        assert row["packed_rows_read"] == cpu[name]["packed_rows_read"]
        assert row["ppl"] == pytest.approx(cpu[name]["ppl"], rel=1e-2), name
        # learned transforms part ways after a few steps; untrained ones do not
        close = 0.5 if "flatquant" in name else 0.1
        assert row["layer_distortion"] == pytest.approx(cpu[name]["layer_distortion"], rel=close)

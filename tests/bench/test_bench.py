"""The benchmarks: refusals on a CPU; on a GPU one small point of each, its error and its peers."""

import json
from itertools import product

import pytest
import torch

from quantmla.bench.decode import Point, run_decode
from quantmla.bench.memory import run_memory
from quantmla.bench.peers import load_peers
from quantmla.bench.result import finish
from quantmla.bench.write import run_write
from quantmla.errors import KernelUnavailableError
from quantmla.kernels.launch import launch_of, split_blobs


def quiet(what, done, total):
    return None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed():
    with pytest.raises(KernelUnavailableError, match="there is nothing to time"):
        run_decode([], flashmla=None, fa3=None, rounds=1, seed=0, tell=quiet)
    with pytest.raises(KernelUnavailableError, match="there is nothing to time"):
        run_write(["c4r4"], [3], rounds=1, seed=0)


def test_a_library_that_does_not_load_is_named(tmp_path):
    path = tmp_path / "peer.so"
    path.write_bytes(b"not a library")
    with pytest.raises(KernelUnavailableError, match="ops of flashmla"):
        load_peers(path, None)
    assert list(load_peers(None, None)) == ["triton", "sdpa"]


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 2])
def test_decode_rows(queries, tmp_path):
    points = [Point("c4r4", 16, queries, 2, 300), Point("c2r4", 5, queries, 1, 64)]
    rows = run_decode(points, flashmla=None, fa3=None, rounds=2, seed=0, tell=quiet)
    for row, point in zip(rows, points, strict=True):
        assert (row["scheme"], row["h"], row["s_q"]) == (point.scheme, point.heads, queries)
        assert row["ours_us"] > 0
        assert row["error"] <= 2e-3
        assert row["ratio"] is None
        assert (row["bf16_us"]["triton"] is None) == (queries > 1)
    finish(rows, 0, tmp_path / "decode.json")
    saved = json.loads((tmp_path / "decode.json").read_text())
    assert saved["rows"] == rows
    assert saved["manifest"]["seed"] == 0


@pytest.mark.gpu
def test_write_rows():
    for row in run_write(["c4r4"], [3, 300], rounds=2, seed=0):
        assert row["us"] > 0
        assert row["moved_bytes"] == row["tokens"] * (1152 + 316)


@pytest.mark.parametrize("batch", [1, 8, 33, 128])
@pytest.mark.parametrize("blobs", [0, 1, 7, 256, 2048])
def test_a_split_covers_the_context_with_whole_waves(batch, blobs):
    size = split_blobs(batch, 1, blobs, 132, 2)
    assert 1 <= size <= max(blobs, 1)
    parts = -(-max(blobs, 1) // size)
    assert batch * parts <= max(5 * 264, batch)


def test_small_batches_are_split_and_large_ones_are_not():
    assert split_blobs(1, 1, 256, 132, 2) < 8
    assert split_blobs(512, 1, 256, 132, 2) == 256


def test_every_architecture_has_a_launch():
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 1), None):
        for rows, bits in product((1, 16, 17, 1024), ((4, 4), (2, 4), (8, 8), (3, 4))):
            for kernel in ("decode", "prefill"):
                launch = launch_of(kernel, rows, *bits, capability)
                assert launch.rows in (16, 32)
                assert 64 % (launch.tile_tokens * launch.chunks) == 0


def test_memory_of_a_paged_cache_is_what_is_accounted():
    for row in run_memory(["c4r4", "c2r4"], [4096], layers=2, requests=1, device="cpu"):
        assert row["allocated_bytes"] == row["accounted_bytes"]
        assert row["ratio"] >= {"c4r4": 3.25, "c2r4": 5.0}[row["scheme"]]


@pytest.mark.gpu
def test_memory_on_the_device_is_what_is_accounted():
    rows = run_memory(["c4r4", "c2r4"], [4096, 131072], layers=3, requests=2, device="cuda")
    for row in rows:
        assert abs(row["allocated_bytes"] / row["accounted_bytes"] - 1) <= 0.01
    for row, bound in zip(rows, (3.25, 3.6, 5.0, 5.9), strict=True):
        assert row["ratio"] >= bound

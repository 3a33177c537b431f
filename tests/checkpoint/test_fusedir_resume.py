"""A killed or interrupted run resumes to the same bytes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fusing import random_transforms, snapshot
from quantmla.checkpoint.reader import CheckpointReader

KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from fusing import block_for, random_transforms
from quantmla.checkpoint.fusedir import fuse_checkpoint
source, out, shards = sys.argv[1], sys.argv[2], int(sys.argv[3])
def progress(shard, done, total):
    if done == shards:
        os.kill(os.getpid(), signal.SIGKILL)
fuse_checkpoint(source, out, random_transforms(source), block_for(source), progress=progress)
"""


@pytest.mark.parametrize("after_shards", [2, 4])
def test_resume_after_kill_gives_the_same_bytes(source, fuse, tmp_path, after_shards):
    whole = snapshot(fuse(out=tmp_path / "whole" / "fused"))
    out = tmp_path / "out" / "fused"
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(source), str(out), str(after_shards), tests]
    assert subprocess.run(command, env=env, check=False).returncode == -signal.SIGKILL
    assert not out.exists()
    (temporary,) = out.parent.glob(".fused.tmp-*")
    shards = CheckpointReader(source).shards
    inodes = {s: (temporary / s).stat().st_ino for s in shards[:after_shards]}
    (temporary / shards[after_shards]).write_bytes(b"half a shard")
    (temporary / ".config.json.123.tmp").write_bytes(b"half a file")
    assert snapshot(fuse()) == whole
    assert {s: (out / s).stat().st_ino for s in inodes} == inodes  # finished shards were reused
    assert [p.name for p in out.parent.iterdir()] == ["fused"]


def test_ctrl_c_keeps_finished_shards_and_damage_is_noticed(source, fuse, tmp_path):
    whole = snapshot(fuse(out=tmp_path / "whole" / "fused"))

    def interrupt(_shard, done, _total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fuse(progress=interrupt)
    (temporary,) = (tmp_path / "out").glob(".fused.tmp-*")
    plain = CheckpointReader(source).shards[0]
    damaged = temporary / plain
    data = damaged.read_bytes()
    damaged.unlink()  # it may be a link to the source
    damaged.write_bytes(data[:-1] + b"?")
    assert snapshot(fuse()) == whole


def test_a_stale_temporary_folder_of_another_job_is_cleared(source, fuse, tmp_path):
    def interrupt(_shard, done, _total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fuse(progress=interrupt, transforms=random_transforms(source, seed=5))
    assert len(list((tmp_path / "out").iterdir())) == 1
    fuse()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["fused"]

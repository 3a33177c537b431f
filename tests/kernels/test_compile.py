"""Kernels compile for every GPU generation, on a machine without a GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Runs without TRITON_INTERPRET, which is read when triton is imported.
SCRIPT = """
import json, sys
import quantmla.kernels.ops
assert "triton" not in sys.modules, "the ops import triton before they need it"
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from quantmla.kernels import common, gather, write

POINTERS = {
    "latent": "bf16", "k_rope": "bf16", "rows": "bf16", "out": "bf16", "pages": "u8",
    "slot_mapping": "i64", "nonfinite": "i64", "content_clip": "fp32", "rope_clip": "fp32",
    "rope_feedback": "fp32",
}

def build(kernel, arch, warps, values):
    signature = {}
    for name in kernel.arg_names:
        if name in values:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + POINTERS.get(name.removesuffix("_ptr"), "i32")
        else:
            signature[name] = "i32"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in values and name.endswith(("_ptr", "_stride"))
    }
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    built = compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "cubin": len(built.asm["cubin"]),
        "vectors": ptx.count("ld.global.v4.b32"),
        "flushes": "ftz" in ptx,
        "fused": ptx.count("fma.rn.f32"),
        "integer conversions": ptx.count("cvt.rn.f32.s32"),
    }

sizes = common.constants(512, 64, 4, 4)
names = ("content_clip", "rope_clip", "rope_order", "rope_feedback")
no_clip = {name + "_ptr": None for name in names}
results = {}
for arch in 80, 90, 100:
    values = sizes | no_clip | {"BLOCK_TOKENS": 1}
    results[f"write {arch}"] = build(write.write_kernel, arch, 2, values)
    values = sizes | {"BLOCK_TOKENS": 4, "PAGE": 64}
    results[f"gather {arch}"] = build(gather.gather_kernel, arch, 4, values)
other = common.constants(256, 32, 3, 8) | {"BLOCK_TOKENS": 2}
results["write c3r8"] = build(write.write_kernel, 90, 2, other)
print(json.dumps(results))
"""


def test_kernels_compile(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    # a file: triton reads the source of what it compiles, and errors then show lines
    script = tmp_path / "build.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    for name, result in results.items():
        assert result["cubin"] > 0
        assert not result["flushes"], name  # subnormal numbers count
        assert result["integer conversions"] == 0, name
    for arch in (80, 90):
        write = results[f"write {arch}"]
        assert write["vectors"] > 0, "rows are read 16 bytes at a time"
        # one for each channel of a thread, 8 + 1, one for each of its two zero points, two for each
        # of its two steps, and none that was fused
        assert write["fused"] == 15

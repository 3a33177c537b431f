"""Attention kernels compile for every GPU generation and fit its shared memory."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Runs without TRITON_INTERPRET, which is read when triton is imported.
SCRIPT = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from quantmla.kernels import decode, packed_loop, prefill
from quantmla.kernels.launch import launch_of

TYPES = {
    "q_latent": "*bf16", "q_rope": "*bf16", "new_rows": "*bf16", "words": "*i16",
    "scales": "*bf16", "zeros": "*i16", "rows": "*bf16", "block_table": "*i32",
    "seq_lens": "*i32", "row_slots": "*i32", "starts": "*i32", "out": "*fp32", "lse": "*fp32",
    "out_parts": "*fp32", "lse_parts": "*fp32", "scale_log2": "fp32",
}

def build(kernel, arch, warps, values):
    signature = {
        name: "constexpr" if name in values else TYPES.get(name, "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("slot_stride", "blob_stride_bytes")
    }
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    built = compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    ptx = built.asm["ptx"]
    return {
        "shared": built.metadata.shared,
        "products": ptx.count("mma.sync") + ptx.count("wgmma"),
        "unpacked": ptx.count("0x43004300") + ptx.count("1124090624"),
        "conversions": ptx.count("cvt.rn.bf16.s"),
    }

results = {}
for kind, kernel in ("decode", decode.decode_parts), ("prefill", prefill.prefill_rows):
    for arch, rows, sizes in json.loads(sys.argv[1])[kind]:
        capability = arch // 10, arch % 10
        plan = launch_of(kind, rows, *sizes[2:], capability)
        values = packed_loop.attention_constants(*sizes) | packed_loop.plan_constants(plan)
        values |= {"SINK": 4, "WINDOW": 128, "BLOBS_A_PAGE": 1}
        if kind == "decode":
            values["EARLY"] = capability >= decode.EARLY_LAUNCH
        results[f"{kind} {arch} {rows} {sizes}"] = build(kernel, arch, plan.warps, values)
merge = {"R": 512, "N": 4, "COLUMNS": 128, "CHUNK": 64}
results["merge 80"] = build(decode.merge_parts, 80, 4, merge | {"EARLY": False})
results["merge 90"] = build(decode.merge_parts, 90, 4, merge | {"EARLY": True})
print(json.dumps(results))
"""
# Shared memory of a program, by compute capability (CUDA C++ programming guide).
LIMIT_BYTES = {80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}
C4R4, C8R8, SMALL = (512, 64, 4, 4), (512, 64, 8, 8), (256, 32, 2, 4)
LARGE = (512, 128, 8, 16)  # the most bytes a token
CASES = {
    "decode": [(80, 16, C4R4), (90, 16, C4R4), (100, 16, C4R4), (120, 16, LARGE), (120, 64, C8R8)],
    "prefill": [(86, 64, C4R4), (90, 64, SMALL)],
}


def test_attention_kernels_compile(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    script = tmp_path / "build.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, script, json.dumps(CASES)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    assert len(results) == sum(map(len, CASES.values())) + 2
    for name, result in results.items():
        kind, arch = name.split()[:2]
        assert result["shared"] <= LIMIT_BYTES[int(arch)], name
        if kind != "merge":
            assert result["products"] > 0, name
            assert result["unpacked"] > 0, name
            assert result["conversions"] == 0, f"{name}: codes are converted one by one"

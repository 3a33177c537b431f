"""bench, explain and env as a user types them."""

import json

import pytest
import torch

from tiny import write_tiny


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_explain_says_why_triton_does_not_run(quantmla):
    code, out, _ = quantmla("explain", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["kernel"] in ("reference", "interpreter")
    assert any("GPUs only" in reason for reason in result["reasons_against_triton"])


def test_explain_takes_sizes_from_a_model(quantmla, tmp_path):
    folder = write_tiny(tmp_path / "model", "deepseek_v3")
    code, out, _ = quantmla("explain", "--json", "--model", folder)
    assert code == 0
    result = json.loads(out)
    assert result["kernel"] is None
    assert "kv_lora_rank is 32" in " ".join(result["reasons_against_the_format"])


def test_env_names_the_kernels_of_each_device(quantmla):
    code, out, _ = quantmla("env", "--json")
    assert code == 0
    assert "cpu" in json.loads(out)["kernels"]


def test_a_bad_point_is_a_usage_error(quantmla):
    code, _, err = quantmla("bench", "decode", "--point", "8by16384")
    assert code == 2
    assert "BATCHxCONTEXT" in err

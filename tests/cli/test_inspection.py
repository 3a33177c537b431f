import json

import pytest


@pytest.fixture
def config(model_folder):
    return json.loads((model_folder / "config.json").read_text())


def inspect(quantmla, tmp_path, config, *arguments):
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = quantmla("inspect", tmp_path, "--json", *arguments)
    return code, json.loads(out) if out else None, err


def test_it_says_what_a_token_costs_and_what_would_change(quantmla, model_folder):
    code, out, _ = quantmla("inspect", model_folder, "--json", "--scheme", "C4-R4")
    found = json.loads(out)
    assert code == 0
    assert (found["mla"], found["model_type"]) == (True, "deepseek_v3")
    assert found["dims"]["kv_lora_rank"] == 32
    # 32 + 16 channels; 3 heads of 12 + 16 + 20
    assert found["bytes_per_token"] == {"layer": 96, "model": 192, "expanded_layer": 288}
    assert [(row["scheme"], row["bytes_per_token"]) for row in found["schemes"]] == [("c4r4", 30)]
    assert found["changes"]["rope"] == ["kv_a_proj_with_mqa.weight", "q_proj.weight"]
    assert "kv_b_proj.weight" in found["changes"]["content"]
    assert found["quantmla"] is None


def test_it_compares_formats_and_both_forms_of_prefill(quantmla, tmp_path, config):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16}
    sizes |= {"qk_nope_head_dim": 128, "v_head_dim": 128}
    _, found, _ = inspect(
        quantmla, tmp_path, config | sizes, "--scheme", "c4r4", "--scheme", "c2r4"
    )
    assert [row["record_bytes"] for row in found["schemes"]] == [320, 192]
    ratios = {n: round(ratio, 2) for n, ratio in found["schemes"][0]["study_ratio"].items()}
    assert ratios == {"4096": 3.22, "131072": 3.59}
    assert {"format": "nvfp4", "bytes_per_token": 324, "ratio": 1152 / 324} in found[
        "other_formats"
    ]
    last = found["prefill"]["lengths"][-1]
    assert last["tokens"] == 131072
    assert last["attention_ratio"] == pytest.approx(1088 / 320)
    assert found["prefill"]["break_even_tokens"] == pytest.approx(512 * 256 / 768)


def test_absorbing_that_never_costs_more_is_valid_json(quantmla, model_folder):
    _, out, _ = quantmla("inspect", model_folder, "--json")  # latent 32, heads of 12 + 20
    assert json.loads(out)["prefill"]["break_even_tokens"] == pytest.approx(32 * 32 / 32)
    config = json.loads((model_folder / "config.json").read_text()) | {"v_head_dim": 64}
    path = model_folder.parent / "wide.json"
    path.write_text(json.dumps(config))
    _, out, _ = quantmla("inspect", path, "--json")
    assert json.loads(out)["prefill"]["break_even_tokens"] is None
    _, out, _ = quantmla("inspect", path)
    assert "never costs more" in out


def test_readers_get_a_table(quantmla, model_folder):
    _, out, _ = quantmla("inspect", model_folder)
    assert "multi-head latent attention" in out
    assert "c2r4" in out
    for title in ("As the study counts", "Other formats", "Attention of a prefill"):
        assert title in out
    assert "from chunks of 32 tokens on" in out
    _, from_file, _ = quantmla("inspect", model_folder / "config.json")
    assert from_file.splitlines()[1:] == out.splitlines()[1:]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "llama", "kv_lora_rank": None}, "no kv_lora_rank"),
        ({"model_type": "deepseek_v32"}, "indexer"),
        ({"model_type": "something_new"}, "not known here"),
    ],
)
def test_other_models_get_a_reason(quantmla, tmp_path, config, change, reason):
    code, found, _ = inspect(quantmla, tmp_path, config | change)
    assert code == 0
    assert found["mla"] is False
    assert reason in found["reason"]


def test_unknown_scheme_lists_the_spellings(quantmla, tmp_path, config):
    code, _, err = inspect(quantmla, tmp_path, config, "--scheme", "k4v4")
    assert code == 1
    assert "c<bits>r<bits>" in err

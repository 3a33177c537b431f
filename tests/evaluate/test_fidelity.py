import json
import math
import shutil

import pytest
import torch

from quantmla.config import KVScheme, LayerBits
from quantmla.errors import EvaluationError, GateError, SchemeError
from quantmla.evaluate.fidelity import measure_fidelity, score
from quantmla.evaluate.model import Settings, Subject, effective_block, loaded
from quantmla.evaluate.row import require_valid
from quantmla.text import cut_windows
from tiny_text import write_tiny_with_tokenizer

C4R4 = KVScheme.parse("c4r4")


def measure(folder, tokenizer, text, subjects, tmp_path, settings=None, window=200):
    windows = cut_windows(tokenizer, text, window_tokens=window, tokens=2 * window)
    reference = Subject("bf16", folder, path="absorbed")
    settings = settings or Settings(chunk_tokens=64)
    return list(measure_fidelity(reference, subjects, windows, settings, scratch=tmp_path))


def test_expanded_attention_agrees_with_plain_transformers(model_folder, tokenizer, text, tmp_path):
    subject = Subject("bf16", model_folder, path="expanded")
    reference, row = measure(model_folder, tokenizer, text, [subject], tmp_path)
    windows = cut_windows(tokenizer, text, window_tokens=200, tokens=400)
    with loaded(model_folder, Settings()) as model, torch.no_grad():
        losses = [model(ids[None], labels=ids[None]).loss.item() for ids in windows.ids]
    assert row["ppl"] == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)
    assert row["attention"] == "expanded BF16"
    # rows are rounded to BF16 in the absorbed path, nothing else differs
    assert reference["ppl"] == pytest.approx(row["ppl"], rel=1e-2)
    assert 0 < row["kl"] < 1e-4


def test_reference_against_itself_is_zero(model_folder, tokenizer, text, tmp_path):
    subject = Subject("same", model_folder, path="absorbed")
    reference, row = measure(model_folder, tokenizer, text, [subject], tmp_path)
    assert (row["kl"], row["top1_flips"]) == (0.0, 0.0)
    assert row["ppl"] == reference["ppl"]
    assert reference["kl"] is None


def test_kl_and_flips_are_those_of_the_definition(model_folder, tokenizer, text, tmp_path):
    subject = Subject("rtn", model_folder, scheme=C4R4)
    windows = cut_windows(tokenizer, text, window_tokens=200, tokens=200)
    settings = Settings()
    logprobs = []
    for case in (Subject("bf16", model_folder, path="absorbed"), subject):
        with loaded(model_folder, settings) as model, torch.no_grad():
            from quantmla.evaluate.model import new_cache

            kwargs = new_cache(case, settings).as_kwargs(model)
            logprobs.append(model(windows.ids, **kwargs).logits[0, :-1].double().log_softmax(-1))
    p, q = logprobs
    reference = Subject("bf16", model_folder, path="absorbed")
    _, row = measure_fidelity(reference, [subject], windows, settings, scratch=tmp_path)
    assert row["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3)
    assert row["top1_flips"] == (p.argmax(-1) != q.argmax(-1)).double().mean().item()
    picked = q.gather(1, windows.ids[0, 1:, None])
    assert row["nll"] == pytest.approx(-picked.mean().item(), rel=1e-6)


def test_counter_is_the_number_that_the_policy_gives(model_folder, tokenizer, text, tmp_path):
    subject = Subject("rtn", model_folder, scheme=C4R4)
    _, row = measure(model_folder, tokenizer, text, [subject], tmp_path)
    # query i has i + 1 - 132 packed keys; 2 windows of 200 tokens, 2 layers
    expected = 2 * 2 * sum(max(0, i + 1 - 132) for i in range(200))
    assert row["packed_rows_read"] == row["packed_rows_expected"] == expected
    assert row["valid"]


def test_strict_results_do_not_depend_on_chunks_or_batch(model_folder, tokenizer, text, tmp_path):
    rows = []
    for chunk, batch in ((200, 1), (37, 1), (64, 2)):
        settings = Settings(chunk_tokens=chunk, batch=batch)
        subject = Subject("rtn", model_folder, scheme=C4R4)
        rows.append(measure(model_folder, tokenizer, text, [subject], tmp_path, settings)[1])
    for row in rows[1:]:
        assert row["nll"] == pytest.approx(rows[0]["nll"], abs=1e-5)
        assert row["packed_rows_read"] == rows[0]["packed_rows_read"]


def test_fast_mode_says_so_and_reads_fewer_rows(model_folder, tokenizer, text, tmp_path):
    settings = Settings(prefill="fast", chunk_tokens=64)
    subject = Subject("rtn", model_folder, scheme=C4R4)
    fast = measure(model_folder, tokenizer, text, [subject], tmp_path, settings)[1]
    strict = measure(model_folder, tokenizer, text, [subject], tmp_path)[1]
    assert fast["prefill"] == "fast"
    assert fast["valid"], fast["invalid_reason"]
    assert 0 < fast["packed_rows_read"] < strict["packed_rows_read"]


def test_one_bit_wrecks_the_score(model_folder, tokenizer, text, tmp_path):
    schemes = ("c8r8", "c4r4", "c2r2", "c1r1")
    subjects = [Subject("rtn", model_folder, scheme=KVScheme.parse(name)) for name in schemes]
    _, c8, c4, c2, c1 = measure(model_folder, tokenizer, text, subjects, tmp_path, window=400)
    assert c8["kl"] < c4["kl"] < c2["kl"] < c1["kl"]
    assert c1["kl"] > 50 * c4["kl"]
    assert c1["top1_flips"] > 0.1 > c4["top1_flips"]


def test_a_run_that_reads_no_packed_row_is_invalid(model_folder, tokenizer, text, tmp_path):
    subject = Subject("rtn", model_folder, scheme=C4R4)
    _, row = measure(model_folder, tokenizer, text, [subject], tmp_path, window=132)
    assert row["packed_rows_read"] == 0
    assert not row["valid"]
    with pytest.raises(GateError, match="rtn 132") as caught:
        require_valid([row])
    assert caught.value.exit_code == 3


def test_protection_can_be_switched_off(model_folder, tokenizer, text, tmp_path):
    plain = Subject("rtn", model_folder, scheme=C4R4)
    bare = Subject("rtn", model_folder, scheme=C4R4, sink_tokens=0, window_tokens=0)
    _, protected, unprotected = measure(
        model_folder, tokenizer, text, [plain, bare], tmp_path, window=100
    )
    assert not protected["valid"]
    assert unprotected["packed_rows_read"] == 2 * 2 * 100 * 101 // 2
    assert unprotected["valid"]


def test_a_wrong_count_is_invalid(model_folder, tokenizer, text, monkeypatch):
    windows = cut_windows(tokenizer, text, window_tokens=200, tokens=200)
    monkeypatch.setattr("quantmla.evaluate.row.packed_pairs", lambda *_: 7)
    with loaded(model_folder, Settings()) as model:
        row = score(model, Subject("rtn", model_folder, scheme=C4R4), windows, Settings())
    assert not row["valid"]
    assert "14 expected" in row["invalid_reason"]


def test_every_row_says_how_it_was_measured(model_folder, tokenizer, text, tmp_path):
    subject = Subject("rtn", model_folder, scheme=C4R4)
    reference, row = measure(model_folder, tokenizer, text, [subject], tmp_path)
    assert (reference["attention"], row["attention"]) == ("absorbed BF16", "absorbed quantised")
    assert (row["scheme"], row["dtype"], row["prefill"]) == ("c4r4", "float32", "strict")
    assert (row["sink_tokens"], row["window_tokens"], row["group"]) == (4, 128, 64)
    assert (row["zero"], row["clip"], reference["clip"]) == ("zp8", False, None)
    assert row["window"] == 200
    assert row["text_sha256"] == text.sha256
    # 32 + 16 channels: 24 B of codes, 2 groups with 3 B each, and no padding at 64 * 30 = 15 * 128
    assert (reference["bytes_per_token"], row["bytes_per_token"]) == (96, 30)


def test_layers_of_different_bits_count_as_they_are(model_folder, tokenizer, text, tmp_path):
    folder = tmp_path / "mixed"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    block = effective_block(Subject("rtn", model_folder, scheme=C4R4))
    bits = LayerBits(content_bits=16, rope_bits=16)
    config["quantmla"] = block.model_copy(update={"per_layer": {"0": bits}}).to_config()
    (folder / "config.json").write_text(json.dumps(config))
    _, row = measure(folder, tokenizer, text, [Subject("rtn", folder)], tmp_path)
    assert (row["scheme"], row["packed_layers"], row["cache_layers"]) == ("mixed", 1, 2)
    assert row["valid"], row["invalid_reason"]
    assert row["packed_rows_read"] == 2 * sum(max(0, i + 1 - 132) for i in range(200))


def test_folder_without_block_needs_a_scheme(model_folder, tokenizer, text, tmp_path):
    with pytest.raises(SchemeError, match="quantmla block"):
        measure(model_folder, tokenizer, text, [Subject("rtn", model_folder)], tmp_path)


def test_window_beyond_the_context_is_refused(model_folder, tokenizer, text, tmp_path):
    with pytest.raises(EvaluationError, match="at most 512 tokens"):
        measure(model_folder, tokenizer, text, [], tmp_path, window=600)


def test_nan_weights_are_named(tmp_path, tokenizer, text):
    from safetensors.torch import load_file, save_file

    folder = write_tiny_with_tokenizer(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EvaluationError, match=r"not finite\n  where: bf16, window 0"):
        measure(folder, tokenizer, text, [], tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v2", "minicpm3", "longcat_flash", "mistral4"])
def test_other_families_count_as_expected(family, tmp_path, tokenizer, text):
    yarn = family == "mistral4"
    folder = write_tiny_with_tokenizer(tmp_path / "m", family, q_lora_rank=24, yarn=yarn)
    subject = Subject("rtn", folder, scheme=C4R4)
    _, row = measure(folder, tokenizer, text, [subject], tmp_path, window=150)
    assert row["valid"], row["invalid_reason"]
    assert row["cache_layers"] == (4 if family == "longcat_flash" else 2)
    assert 0 < row["kl"] < 1

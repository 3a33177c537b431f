"""Exchanged weights against fused folders, and simulated formats in a whole model."""

import pytest
import torch

from fusing import block_for, random_transforms
from quantmla.ablate.cells import Cell
from quantmla.ablate.scoring import ExchangeModel, cell_cache, expected_pairs, is_packed, score_cell
from quantmla.checkpoint.fusedir import fuse_checkpoint
from quantmla.engine.hf import QuantMLACache
from quantmla.evaluate.model import Settings, loaded
from quantmla.quant.codec import Affine
from quantmla.transform.layer import LayerTransform
from tiny import TINY_CASES, write_tiny

IDS = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(5))
NOTHING = [(None, None)] * 4
# every way to name and pair the attention weights; test_families has the whole matrix
FAMILIES = [
    "deepseek_v2-qlora",
    "deepseek_v3-half",
    "deepseek_v3-qlora-bias",
    "longcat_flash",
    "minicpm3",
    "mistral4",
]


def logits(model, cache):
    with torch.no_grad():
        return model(input_ids=IDS, **cache.as_kwargs(model)).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_exchanged_weights_are_those_of_the_fused_folder(tmp_path, family):
    kwargs = dict(TINY_CASES)[family]
    source = write_tiny(tmp_path / "source", dtype=torch.bfloat16, **kwargs)
    transforms = random_transforms(source, clip=True)
    folder = fuse_checkpoint(
        source, tmp_path / "fused", transforms, block_for(source, sink_tokens=0, window_tokens=0)
    )
    with loaded(folder, Settings()) as model:
        expected = logits(model, QuantMLACache.from_config(model.config, folder=folder))
    cell = Cell("c4r4", "quantmla", "quantmla", policy=False)
    with loaded(source, Settings()) as model:
        exchange = ExchangeModel(model, source)
        bf16 = [logits(model, QuantMLACache.from_scheme("c16r16", model.config))]
        exchange.take(transforms)
        cache = cell_cache(cell, transforms, NOTHING, model.config, (4, 128))
        assert torch.equal(logits(model, cache), expected)
        exchange.take([LayerTransform()] * len(transforms))
        bf16.append(logits(model, QuantMLACache.from_scheme("c16r16", model.config)))
    assert torch.equal(*bf16)


def test_a_dense_matrix_is_applied_and_undone_by_the_cache(tmp_path):
    source = write_tiny(tmp_path)
    generator = torch.Generator().manual_seed(1)

    def dense(size):
        return torch.eye(size, dtype=torch.float64) + 0.03 * torch.randn(
            size, size, dtype=torch.float64, generator=generator
        )

    transforms = [LayerTransform(content_matrix=dense(32), rope_matrix=dense(16)) for _ in range(2)]
    cell = Cell("c8r8", "rtn", "rtn", policy=False)
    assert is_packed(cell, [LayerTransform()] * 2)
    assert not is_packed(cell, transforms)
    with loaded(source, Settings()) as model:
        exact = logits(model, QuantMLACache.from_scheme("c16r16", model.config))
        cache = cell_cache(cell, transforms, NOTHING[:2], model.config, (4, 128))
        near = logits(model, cache)
        fine = cell_cache(cell, [LayerTransform()] * 2, NOTHING[:2], model.config, (4, 128))
        plain = logits(model, fine)
        store, rows = cache.layers[1].store, torch.randn(5, 32)
    expected = Affine(8).round_trip(rows @ transforms[1].content_matrix.float())
    expected = expected @ transforms[1].content_matrix.inverse().float()
    torch.testing.assert_close(store.content.round_trip(rows), expected)
    assert not torch.equal(near, plain)
    errors = [float((part - exact).norm() / exact.norm()) for part in (near, plain)]
    assert 0 < errors[0] < 2 * errors[1] < 0.1


@pytest.mark.parametrize(
    ("form", "policy", "pairs"),
    [
        ("c4r4", True, sum(max(0, i + 1 - 132) for i in range(200))),
        ("c4r4", False, 200 * 201 // 2),
        ("c4-kivi4", False, sum(64 * (i // 64) for i in range(200))),
        ("nvfp4", True, sum(max(0, i + 1 - 132) for i in range(200))),
    ],
)
def test_packed_rows_are_counted(tmp_path, form, policy, pairs):
    source = write_tiny(tmp_path)
    cell, transforms = Cell(form, "rtn", "rtn", policy), [LayerTransform()] * 2
    ids = torch.randint(0, 96, (2, 200), generator=torch.Generator().manual_seed(2))
    statics = [(0.01, 0.01)] * 2 if form == "nvfp4" else NOTHING[:2]
    with loaded(source, Settings()) as model:
        scores, read, expected = score_cell(
            model,
            lambda: cell_cache(cell, transforms, statics, model.config, (4, 128)),
            ids,
            Settings(chunk_tokens=64),
            cell.name,
        )
        reference = QuantMLACache.from_scheme("c16r16", model.config)
        assert expected_pairs(reference, 200) == 0
    assert read == expected == 2 * 2 * pairs
    assert scores.nll.shape == scores.kl.shape == scores.flips.shape == (2, 199)

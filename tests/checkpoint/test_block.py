"""A new block says what the family and the scheme decide, and no more."""

import pytest

from fusing import read_config
from quantmla.checkpoint.block import new_block
from quantmla.checkpoint.families import family_of
from quantmla.config import KVScheme, QuantMLABlock
from tiny import write_tiny


@pytest.mark.parametrize("method", ["rtn", "quarot_online", "quantmla"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_new_block(tmp_path, family, method):
    config = read_config(write_tiny(tmp_path / "model", family, q_lora_rank=24))
    scheme = KVScheme.parse("c2r8", group=32, zero="min16", sink_tokens=1, window_tokens=9)
    row = family_of(config)
    block = new_block(method, scheme, row, config)
    assert [block.scheme(layer) for layer in (0, 1)] == [scheme] * 2
    assert block.method == method
    assert block.rope_pairing == row.rope_pairing(config)
    assert block.rope_pairing_cache == row.rope_pairing_cache(config)
    assert block.rope_online == ("hadamard" if method == "quarot_online" else None)
    assert (block.clip, block.writer_sha256, block.norm_eps, block.fingerprint) == (
        False,
        *[None] * 3,
    )
    assert QuantMLABlock.from_config({"quantmla": block.to_config()}) == block

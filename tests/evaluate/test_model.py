import pytest

from quantmla.config import KVScheme
from quantmla.evaluate.model import Settings, Subject, new_cache, tokenizer_sha256
from quantmla.loading import load_tokenizer
from tiny_text import write_tokenizer


def test_tokenizer_hash_is_of_what_it_does(tmp_path):
    for name, bos in (("a", False), ("b", False), ("c", True)):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, bos=bos)
    hashes = [tokenizer_sha256(load_tokenizer(tmp_path / name)) for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("path", ["absorbed", "quantised"])
def test_scoring_refuses_non_finite_latents_on_every_device(model_folder, path):
    scheme = KVScheme.parse("c4r4") if path == "quantised" else None
    cache = new_cache(Subject("rtn", model_folder, path=path, scheme=scheme), Settings())
    # None would replace them on a GPU
    assert [layer.store.check_finite for layer in cache.layers] == [True, True]

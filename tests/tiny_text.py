"""A character tokenizer for tiny checkpoints, and text that it can read."""

from __future__ import annotations

import random
from pathlib import Path

from tiny import write_tiny

# 96 tokens, the vocabulary of tiny checkpoints: line feed and the printable ASCII characters
CHARACTERS = ["\n", *map(chr, range(32, 127))]


def write_tokenizer(folder: Path, *, bos: bool = False) -> None:
    """Write a tokenizer with one token a character; with `bos` it starts each text with "~"."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="~ $A", special_tokens=[("~", vocab["~"])]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", bos_token="~" if bos else None
    )
    fast.save_pretrained(folder)


def write_tiny_with_tokenizer(folder: Path, family: str = "deepseek_v3", **kwargs) -> Path:
    """Write a tiny checkpoint with a tokenizer; arguments of `write_tiny`."""
    write_tiny(folder, family, **kwargs)
    write_tokenizer(folder)
    return folder


def write_text(path: Path, characters: int, seed: int = 0) -> Path:
    """Write prose-like text of at least so many characters, the same for the same seed."""
    rng = random.Random(seed)
    words = ["the", "cache", "of", "a", "latent", "is", "read", "in", "pages", "and", "kept"]
    text = ""
    while len(text) < characters:
        text += " ".join(rng.choice(words) for _ in range(rng.randint(5, 12))) + ".\n"
    path.write_text(text, encoding="utf-8")
    return path

"""A text and a tokenizer for tiny models: one token a byte, no files."""

WORDS = ["latent", "rope", "the", "cache", "of", "quantised", "keys", "and", "a", "window"]


class ByteTokenizer:
    """Maps bytes to ids 3 .. vocab_size - 1; with `bos_token_id` it starts a text with that id."""

    def __init__(self, vocab_size=96, bos_token_id=None):
        self.vocab_size, self.bos_token_id = vocab_size, bos_token_id

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [3 + byte % (self.vocab_size - 3) for byte in text.encode()]
        if add_special_tokens and self.bos_token_id is not None:
            ids = [self.bos_token_id, *ids]
        return {"input_ids": ids}


def write_text(path, characters=4000):
    """Write English-like text whose windows differ from one another."""
    text, state = [], 7
    while sum(map(len, text)) < characters:
        state = (state * 1103515245 + 12345) % 2**31
        text.append(WORDS[state // 65536 % len(WORDS)] + " ")
    path.write_text("".join(text)[:characters], encoding="utf-8")
    return path

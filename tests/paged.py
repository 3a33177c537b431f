"""Random tokens, pools and block tables for the ops of the paged cache."""

from dataclasses import dataclass, field, replace

import torch

from quantmla.kernels.support import page_layout

PAGE = 64


@dataclass
class Tokens:
    """Arguments of `ops.write`, and what they are made of."""

    rank: int
    rope: int
    content_bits: int
    rope_bits: int
    latent: torch.Tensor
    k_rope: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    row_slots: torch.Tensor
    seq_ends: torch.Tensor
    nonfinite: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    content_clip: torch.Tensor | None = None
    rope_clip: torch.Tensor | None = None
    sink_tokens: int = 4
    rope_order: torch.Tensor | None = None
    rope_feedback: torch.Tensor | None = None

    @property
    def layout(self):
        return page_layout(self.rank, self.rope, self.content_bits, self.rope_bits)

    def args(self):
        return (
            *(self.latent, self.k_rope, self.pages, self.rows, self.slot_mapping),
            *(self.positions, self.row_slots, self.seq_ends, self.nonfinite),
            *(self.content_clip, self.rope_clip),
            *(self.content_bits, self.rope_bits, self.sink_tokens),
            *(self.rope_order, self.rope_feedback),
        )

    def fresh(self, device):
        """A copy on a device whose pools may be written; strides of the pools are kept."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        copy = replace(self, **moved)
        for name in ("pages", "rows"):
            source = getattr(self, name)
            target = source.new_empty(source.untyped_storage().nbytes() // source.itemsize)
            target.set_(source.untyped_storage().clone(), 0, target.shape)
            target = target.to(device)
            view = target.as_strided(source.shape, source.stride(), source.storage_offset())
            setattr(copy, name, view)
        copy.nonfinite = self.nonfinite.clone().to(device)
        return copy


def random_tokens(
    count,
    *,
    rank=512,
    rope=64,
    bits=(4, 4),
    dtype=torch.bfloat16,
    blobs=3,
    slots=3,
    sink=4,
    ring=24,
    fill=0xFF,
    clip=False,
):
    """One sequence of `count` tokens in shuffled places of a pool of 0xFF bytes and NaN rows."""
    layout = page_layout(rank, rope, *bits)
    content_clip = rope_clip = None
    if clip:
        content_clip = torch.rand(layout.content_groups) * 0.7 + 0.3 if bits[0] != 16 else None
        rope_clip = torch.rand(layout.rope_groups) * 0.7 + 0.3 if bits[1] != 16 else None
    return Tokens(
        rank,
        rope,
        *bits,
        latent=torch.randn(count, rank).to(dtype),
        k_rope=(torch.randn(count, rope) * 5).to(dtype),
        pages=torch.full((blobs, layout.page_bytes), fill, dtype=torch.uint8),
        rows=torch.full((slots, sink + ring, rank + rope), torch.nan, dtype=torch.bfloat16),
        slot_mapping=torch.randperm(blobs * PAGE)[:count],
        positions=torch.arange(count, dtype=torch.int32),
        row_slots=torch.full((count,), slots - 1, dtype=torch.int32),
        seq_ends=torch.full((count,), count, dtype=torch.int32),
        content_clip=content_clip,
        rope_clip=rope_clip,
        sink_tokens=sink,
    )


def same_bits(a, b):
    """Equal bytes, whatever they mean."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

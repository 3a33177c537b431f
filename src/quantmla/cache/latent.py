"""One cache layer: packed pages of every token next to the BF16 rows of first and recent tokens.

Keys are addressed by logical position: padding is dropped when tokens are written, so that a
sequence has the same bytes in any batch. Every token is packed; what a query reads in BF16 comes
from `RecentRows`. A scheme of 16 bits on both paths has no pages: every row is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.cache.layout import PageLayout, pages_for_tokens
from quantmla.cache.recent import RecentRows, finite_rows, grown
from quantmla.errors import CacheError
from quantmla.quant import Clip, Quantized, group_count, quantize, usable_clip
from quantmla.quant.feedback import Feedback, feed_back

UNBOUNDED_TOKENS = 1 << 40


@dataclass(frozen=True)
class VisibleRows:
    """What the queries of one call may read, in logical positions.

    A query at position i, in a chunk that starts at position a, reads rows j <= i: from `packed`
    where sink_tokens <= j <= a - window_tokens, from `sink` or `band` otherwise. In strict mode a
    chunk is one token.

    Fields:
        sink [B, sink_tokens, R+P]: rows from position 0.
        packed [B, T, R+P]: dequantised rows from position sink_tokens.
        band [B, W, R+P]: BF16 rows from position band_start[b].
        band_start, start, count [B]: position of the first band row, position of the first new
            token and number of new tokens.
        order [B, S] or None: column of the n-th new token; padding comes last.
        window_tokens, chunk_tokens [tokens]: policy of the call.
    """

    sink: Tensor
    packed: Tensor
    band: Tensor
    band_start: list[int]
    start: list[int]
    count: list[int]
    order: Tensor | None
    window_tokens: int
    chunk_tokens: int


class LatentLayer:
    """Rectangular batch store of one cache layer.

    Args:
        layout: PageLayout, or anything with its fields, `allocate`, `store` and `load`.
        layer_idx: named in errors.
        slack_tokens [tokens]: ring rows beyond the window, so that so many tokens can be cropped.
        row_dtype: type of the BF16 rows; float32 skips the rounding, for exactness tests.
        content_clip, rope_clip [float, 1 or G]: clip ratios of the writer, in (0, 1].
        rope_feedback: how the writer rounds the rotated key; None for plain rounding.
        check_finite: refuse NaN and Inf, or replace and count them; None refuses on the CPU only.
    Raises: CacheError for clip ratios that cannot be used.
    Source: algorithms.md section 6.1.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        layer_idx: int = 0,
        slack_tokens: int = 0,
        row_dtype: torch.dtype = torch.bfloat16,
        content_clip: Clip = None,
        rope_clip: Clip = None,
        rope_feedback: Feedback | None = None,
        check_finite: bool | None = None,
    ):
        scheme = layout.scheme
        self.layout, self.layer_idx, self.row_dtype = layout, layer_idx, row_dtype
        self.check_finite = check_finite
        self.content_clip = self._checked_clip("content", layout.kv_lora_rank, content_clip)
        self.rope_clip = self._checked_clip("rope", layout.qk_rope_head_dim, rope_clip)
        self.rope_feedback = rope_feedback
        self.rows_only = scheme.content_bits == scheme.rope_bits == 16
        self.slack_tokens = slack_tokens
        self.attention_kernel: str | None = None  # what ran the attention of the last call
        self.packed_rows_read = 0
        self.nonfinite: Tensor | int = 0
        self._writers: dict[torch.device, dict[str, Tensor | None]] = {}
        self.reset()

    def _checked_clip(self, path: str, channels: int, clip: Clip) -> Clip:
        groups = group_count(channels, self.layout.scheme.group)
        if not usable_clip(clip, groups):
            got = clip.flatten()[:8].tolist() if isinstance(clip, Tensor) else clip
            expected = f"a ratio in (0, 1], or a tensor of {groups}"
            self._refuse(f"the {path} clip ratio cannot be used", expected, got)
        return clip

    def reset(self) -> None:
        """Drop every token and all memory; the counters go on."""
        self.pages: Tensor | None = None  # [B, n_pages, page_bytes, uint8]
        self.recent: RecentRows | None = None
        # [B, columns, bool], once there was padding; on the host, where calls are checked
        self.valid: Tensor | None = None
        self.device: torch.device | None = None
        self.columns = 0  # tokens given per sequence, padding included
        self.lengths: list[int] = []  # tokens stored per sequence

    def resident_bytes(self) -> int:
        """Bytes of all tensors that this layer holds."""
        tensors = (self.pages, self.recent, self.valid)
        return sum(t.nbytes for t in tensors if t is not None)

    def append(
        self,
        latent: Tensor,
        k_rope: Tensor,
        mask: Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> VisibleRows:
        """Store new tokens and return what their queries may read.

        Args:
            latent [B, S, R]: latents after the norm.
            k_rope [B, S, P]: keys after RoPE, in cache order.
            mask [B, columns + S]: 0 on padding, the columns of earlier calls included; None if
                there is no new padding. Best on the host.
            chunk_tokens [tokens]: None for strict mode; in fast mode the length of a chunk.
        Returns: VisibleRows.
        Raises: CacheError for wrong shapes, a mask that contradicts an earlier one, or non-finite
            values; nothing is stored then.
        Source: algorithms.md sections 6.1 and 6.3.
        """
        mask = None if mask is None else mask.cpu()
        self._check(latent, k_rope, mask)
        raw = torch.cat([latent.detach(), k_rope.detach()], -1).to(self.row_dtype)
        rows = self._finite(raw)
        start, count, order = self._admit(rows, mask)
        if order is not None:
            order = order.to(rows.device)
            index = order.unsqueeze(-1).expand_as(rows)
            rows, raw = rows.gather(1, index), raw.gather(1, index)
        past = None if self.rows_only else self.recent.past(start)
        self._write(rows, raw, start, count)
        chunk, window = chunk_tokens or 1, self._window(chunk_tokens)
        last = max(count) - 1
        end = max(self.lengths)
        return VisibleRows(
            sink=self._without_unused(self.recent.sink[:, :end], 0),
            packed=self._load(max(start) + last - last % chunk - window + 1),
            band=self._without_unused(self.recent.ring[:, :end], 0)
            if past is None
            else torch.cat([past, rows], 1),
            band_start=[0 if past is None else s - past.shape[1] for s in start],
            start=start,
            count=count,
            order=order,
            window_tokens=window,
            chunk_tokens=chunk,
        )

    def admit(
        self, latent: Tensor, k_rope: Tensor, mask: Tensor | None = None
    ) -> tuple[list[int], list[int], Tensor | None]:
        """Make room for new tokens that the caller writes next; look at them as `append` does.

        Args: latent, k_rope, mask: as in `append`.
        Returns: start and count [B], position of the first new token and number of new tokens of
            each sequence, and order [B, S, on the host], column of the n-th new token, or None if
            none is padding.
        Raises: CacheError as `append`; nothing is changed then.
        Source: own.
        """
        mask = None if mask is None else mask.cpu()
        self._check(latent, k_rope, mask)
        if self._refuses_nonfinite(latent.device):
            self._finite(torch.cat([latent, k_rope], -1).to(self.row_dtype))
        start, count, order = self._admit(latent, mask)
        self.recent.book(self.lengths)
        return start, count, order

    def _check(self, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> None:
        batch, tokens = latent.shape[:2]
        expected = (
            [batch, tokens, self.layout.kv_lora_rank],
            [batch, tokens, self.layout.qk_rope_head_dim],
        )
        got = (list(latent.shape), list(k_rope.shape))
        if got != expected or tokens == 0:
            self._refuse("the rows do not fit the cache", f"{expected}, S >= 1", got)
        if self.lengths and batch != len(self.lengths):
            what = "the batch size changed between two calls"
            next_step = "reorder, repeat or select the cache first, or start a new one"
            self._refuse(what, f"{len(self.lengths)} sequences", f"{batch} sequences", next_step)
        if mask is None:
            return
        if tuple(mask.shape) != (batch, self.columns + tokens):
            self._refuse(
                "the attention mask does not cover the cached and the new tokens",
                [batch, self.columns + tokens],
                list(mask.shape),
                "pass the 2-D mask of the whole sequence, earlier tokens included",
            )
        earlier = mask[:, : self.columns].bool()
        known = torch.ones_like(earlier) if self.valid is None else self.valid
        if not torch.equal(earlier, known):
            what = "the attention mask changed for tokens that are already cached"
            before = "the padding of the earlier calls"
            self._refuse(what, before, "another padding", "start a new cache")

    def _finite(self, rows: Tensor) -> Tensor:
        """Refuse NaN and Inf, or count them and return rows without them."""
        finite = rows.isfinite()
        if not self._refuses_nonfinite(rows.device):
            self.nonfinite = self.nonfinite + (~finite).sum()
            return finite_rows(rows)
        if not bool(finite.all()):
            self._refuse(
                "the latents of a layer are not finite",
                "finite numbers",
                f"{int((~finite).sum())} NaN or Inf values",
                "load the model in bfloat16 or float32; the cause may lie in an earlier layer",
            )
        return rows

    def _refuses_nonfinite(self, device: torch.device) -> bool:
        return device.type == "cpu" if self.check_finite is None else self.check_finite

    def _admit(
        self, new: Tensor, mask: Tensor | None
    ) -> tuple[list[int], list[int], Tensor | None]:
        """Record which new columns are tokens and make room; result as of `admit`."""
        batch, tokens = new.shape[:2]
        self._prepare(batch, new.device)
        start, count, order = self.lengths, [tokens] * batch, None
        if mask is not None and not bool(mask.all()):
            valid = mask.bool()
            added = valid[:, self.columns :]
            if not bool(added.all()):
                count = added.sum(1).tolist()
                order = (~added).to(torch.uint8).argsort(dim=1, stable=True)
            self.valid = valid.clone()
        elif self.valid is not None:
            self.valid = torch.nn.functional.pad(self.valid, (0, tokens), value=True)
        self.columns += tokens
        self.lengths = [s + n for s, n in zip(start, count, strict=True)]
        self.recent.reserve(max(self.lengths))
        if self.pages is not None:
            self.pages = grown(self.pages, pages_for_tokens(max(self.lengths)))
        return start, count, order

    def _prepare(self, batch: int, device: torch.device) -> None:
        """Take memory for the first tokens; bring back what was offloaded."""
        self.device = device
        if self.recent is not None:
            self.to(device)
            return
        scheme = self.layout.scheme
        self.recent = RecentRows(
            batch,
            self.layout.kv_lora_rank + self.layout.qk_rope_head_dim,
            sink_tokens=0 if self.rows_only else scheme.sink_tokens,
            window_tokens=None if self.rows_only else scheme.window_tokens,
            slack_tokens=self.slack_tokens,
            dtype=self.row_dtype,
            device=device,
        )
        if not self.rows_only:
            with torch.inference_mode(False):
                self.pages = self.layout.allocate(batch, n_pages=0, device=device)
        self.lengths = [0] * batch

    def _write(self, rows: Tensor, raw: Tensor, start: list[int], count: list[int]) -> None:
        """Write both forms of the new tokens; sequences of equal start and count at once."""
        runs = list(zip(start, count, strict=True))
        if len(set(runs)) == 1:
            groups = [(slice(0, len(runs)), *runs[0])]
        else:
            groups = [(slice(b, b + 1), *run) for b, run in enumerate(runs)]
        for batch, first, tokens in groups:
            if tokens == 0:
                continue
            some = rows[batch, :tokens]
            if self.pages is not None:
                codes = self._encode(some, raw[batch, :tokens])
                self.layout.store(self.pages[batch], first, *codes)
            self.recent.write(batch, first, some)
        self.recent.book(self.lengths)

    def _encode(self, rows: Tensor, raw: Tensor) -> list[Quantized | Tensor]:
        """Quantise both paths; a 16-bit path stays as it is. `raw` may hold NaN and Inf."""
        scheme, rank = self.layout.scheme, self.layout.kv_lora_rank
        paths = (
            (slice(0, rank), scheme.content_bits, self.content_clip, None),
            (slice(rank, None), scheme.rope_bits, self.rope_clip, self.rope_feedback),
        )
        parts = []
        for channels, bits, clip, feedback in paths:
            if bits == 16:
                parts.append(rows[..., channels])
                continue
            clip = clip.to(rows.device) if isinstance(clip, Tensor) else clip
            settings = {"group": scheme.group, "zero": scheme.zero}
            part = quantize(raw[..., channels], bits, clip=clip, **settings)
            if feedback is not None:
                part = feed_back(rows[..., channels], part, bits, feedback, **settings)
            parts.append(part)
        return parts

    def writer_on(self, device: torch.device) -> dict[str, Tensor | None]:
        """What `ops.write` takes of the writer on a device; None where there is none."""
        if device not in self._writers:
            layout, scheme, writer = self.layout, self.layout.scheme, {}
            for name, clip, bits, channels in (
                ("content_clip", self.content_clip, scheme.content_bits, layout.kv_lora_rank),
                ("rope_clip", self.rope_clip, scheme.rope_bits, layout.qk_rope_head_dim),
            ):
                if clip is not None and bits != 16:
                    clip = torch.as_tensor(clip, dtype=torch.float32, device=device)
                    clip = clip.expand(group_count(channels, scheme.group)).contiguous()
                writer[name] = None if bits == 16 else clip
            if self.rope_feedback is not None and scheme.rope_bits != 16:
                names = ("rope_order", "rope_feedback")
                writer |= zip(names, self.rope_feedback.by_channel(device), strict=True)
            self._writers[device] = writer
        return self._writers[device]

    def _window(self, chunk_tokens: int | None) -> int:
        window = UNBOUNDED_TOKENS if self.rows_only else self.layout.scheme.window_tokens
        # fast mode: the chunk itself is always BF16
        return window if chunk_tokens is None else max(window, 1)

    def _load(self, end: int) -> Tensor:
        """Dequantised rows of positions sink_tokens..end-1."""
        first = self.recent.sink_tokens
        if end <= first:
            return self.recent.ring[:, :0]
        return self._without_unused(torch.cat(self.layout.load(self.pages, first, end), -1), first)

    def _without_unused(self, rows: Tensor, first: int) -> Tensor:
        """Zero what lies behind the end of a shorter sequence, so that it spoils no product."""
        end = first + rows.shape[1]
        if min(self.lengths) >= end:
            return rows
        position = torch.arange(first, end, device=rows.device)
        unused = position >= torch.tensor(self.lengths, device=rows.device)[:, None]
        return rows.masked_fill(unused.unsqueeze(-1), 0)

    def crop(self, tokens: int) -> None:
        """Forget the last columns.

        Args: tokens [tokens, >= 0]: columns to forget, padding included; at most all of them.
        Raises: CacheError if BF16 rows that the next query needs were overwritten in the ring.
        Source: own; ring rule of algorithms.md section 6.1.
        """
        if tokens <= 0 or self.columns == 0:
            return
        keep = max(self.columns - tokens, 0)
        valid = None if self.valid is None else self.valid[:, :keep].clone()
        lengths = [keep] * len(self.lengths) if valid is None else valid.sum(1).tolist()
        if not self.recent.can_crop(lengths):
            self._refuse(
                f"cropping {tokens} tokens needs BF16 rows that were overwritten",
                f"at most {self.slack_tokens + 1} tokens with slack_tokens={self.slack_tokens}",
                f"{tokens} tokens",
                f"create the cache with slack_tokens={tokens} or more",
            )
        self.recent.crop(lengths)
        self.lengths, self.columns, self.valid = lengths, keep, valid

    def select(self, index: Tensor) -> None:
        """Keep, repeat or reorder sequences: sequence b becomes what sequence index[b] was.

        Args: index [B', int64].
        """
        if self.recent is None:
            return
        with torch.inference_mode(False):
            index = index.to(self.recent.rows.device).clone()
            self.recent.select(index)
            if self.pages is not None:
                self.pages = self.pages.index_select(0, index)
            if self.valid is not None:
                self.valid = self.valid.index_select(0, index.cpu())
        self.lengths = [self.lengths[b] for b in index.tolist()]

    def to(self, device: torch.device | str) -> None:
        """Move pages and BF16 rows to a device; nothing happens if they are there."""
        with torch.inference_mode(False):
            if self.recent is not None:
                self.recent.to(device)
            if self.pages is not None:
                self.pages = self.pages.to(device)

    def _refuse(self, what, expected, got, next_step=None) -> None:
        where = f"cache layer {self.layer_idx}"
        raise CacheError(what, where=where, expected=expected, got=got, next_step=next_step)

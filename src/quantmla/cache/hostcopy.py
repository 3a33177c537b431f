"""One request in the memory of the host: all components together, checked before they come back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantmla.cache.layout import PAGE_TOKENS, pages_for_tokens
from quantmla.cache.pages import RequestState
from quantmla.cache.pools import LatentPools
from quantmla.errors import CacheError


@dataclass(frozen=True)
class HostCopy:
    """A request outside of its cache.

    Fields:
        fingerprint: of the checkpoint.
        geometry: layouts and slack (LatentPools.geometry).
        tokens, intact_from: as in RequestState.
        pages: one tensor [ceil(tokens / 64), page_bytes, uint8] a layer.
        rows: one tensor [min(tokens, row_tokens), R+P, bf16] a layer.
    """

    fingerprint: str
    geometry: dict
    tokens: int
    intact_from: int
    pages: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.pages + self.rows)


def copy_to_host(pools: LatentPools, state: RequestState, fingerprint: str) -> HostCopy:
    """Copy what a request holds to the host.

    Args:
        pools: tensors of the cache.
        state: the request.
        fingerprint: of the checkpoint.
    Returns: HostCopy; the copy is complete when this returns.
    Source: own.
    """
    blobs = pools.blobs(state.pages, state.tokens)
    used = [min(PAGE_TOKENS, state.tokens - PAGE_TOKENS * i) for i in range(len(blobs))]
    n_rows = pools.used_rows(state.tokens)
    return HostCopy(
        fingerprint,
        pools.geometry(),
        state.tokens,
        state.intact_from,
        tuple(pools.host_blobs(layer, blobs, used) for layer in range(len(pools.pages))),
        tuple(rows[state.slot, :n_rows].to("cpu", copy=True) for rows in pools.rows),
    )


def check_copy(pools: LatentPools, copy: HostCopy, fingerprint: str) -> None:
    """Refuse a copy that does not fit.

    Args:
        pools: tensors of the cache that it would come back to.
        copy: result of copy_to_host.
        fingerprint: of the checkpoint of that cache.
    Raises: CacheError for another checkpoint, other layouts, or components that are missing.
    """
    where = "PagedLatentCache.restore"
    check_origin(copy.fingerprint, copy.geometry, fingerprint, pools.geometry(), where)
    n_blobs, n_rows = pages_for_tokens(copy.tokens), pools.used_rows(copy.tokens)
    expected = [("pages", n_blobs, p.shape[1:], p.dtype) for p in pools.pages]
    expected += [("rows", n_rows, r.shape[2:], r.dtype) for r in pools.rows]
    got = [("pages", p.shape[0], p.shape[1:], p.dtype) for p in copy.pages]
    got += [("rows", r.shape[0], r.shape[1:], r.dtype) for r in copy.rows]
    if got != expected:
        raise CacheError(
            "a copy of a request is not complete",
            where=where,
            expected=f"pages and rows of {len(pools.pages)} layers for {copy.tokens} tokens",
            got=f"{len(copy.pages)} pages and {len(copy.rows)} rows, or tensors of other sizes",
            next_step="restore what offload returned, unchanged",
        )


def check_origin(
    fingerprint: str, geometry: dict, own_fingerprint: str, own_geometry: dict, where: str
) -> None:
    """Refuse bytes of another checkpoint or another layout.

    Args:
        fingerprint, geometry: of the bytes.
        own_fingerprint, own_geometry: of the cache.
        where: named in the error.
    Raises: CacheError with both fingerprints, or with the first setting that differs.
    """
    if fingerprint != own_fingerprint:
        raise CacheError(
            "these tokens were cached for another checkpoint",
            where=where,
            expected=f"fingerprint {own_fingerprint}",
            got=f"fingerprint {fingerprint}",
            next_step="compute the tokens again with this checkpoint",
        )
    if geometry != own_geometry:
        keys = sorted(own_geometry.keys() | geometry.keys())
        name = next(key for key in keys if own_geometry.get(key) != geometry.get(key))
        raise CacheError(
            "these tokens were cached with other settings",
            where=where,
            expected=f"{name} {own_geometry.get(name)}",
            got=f"{name} {geometry.get(name)}",
            next_step="create the cache with the same layouts and slack, or compute them again",
        )


def copy_to_pool(pools: LatentPools, state: RequestState, copy: HostCopy) -> None:
    """Write a copy to the pages and the slot of a state.

    Args:
        pools: tensors of the cache.
        state: pages and slot that nobody else holds.
        copy: what check_copy let pass.
    """
    index = pools.index(pools.blobs(state.pages, copy.tokens))
    for pages, rows, from_pages, from_rows in zip(
        pools.pages, pools.rows, copy.pages, copy.rows, strict=True
    ):
        pages.index_copy_(0, index, from_pages.to(pools.device))
        rows[state.slot, : len(from_rows)] = from_rows.to(pools.device)

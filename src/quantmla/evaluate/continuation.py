"""Log-probability of continuations, scored through the cache in left-padded batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from quantmla.errors import EvaluationError
from quantmla.evaluate.model import Settings, Subject, new_cache
from quantmla.evaluate.row import NOT_FINITE_NEXT, describe, expected_pairs


@dataclass(frozen=True)
class Request:
    """A context and what should follow it, as token ids; neither may be empty."""

    context: list[int]
    continuation: list[int]

    @property
    def fed_tokens(self) -> int:
        """Tokens that the model sees: all but the last one, which is only predicted."""
        return len(self.context) + len(self.continuation) - 1


@dataclass(frozen=True)
class Answer:
    """How the model takes a continuation.

    Args:
        logprob: sum over its tokens.
        greedy: whether greedy decoding from the context gives exactly these tokens; in strict mode
            scoring in one
            pass and decoding token by token read the same rows, so the argmax of the one pass
            decides it.
        packed: whether any packed row was visible.
    """

    logprob: float
    greedy: bool
    packed: bool


def answer_requests(
    model: torch.nn.Module,
    subject: Subject,
    requests: list[Request],
    settings: Settings,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Answer], dict]:
    """Score all requests, longest first, so that a batch holds sequences of similar length.

    Args:
        model: from `loaded(subject.folder)`.
        subject, settings: what and how.
        requests: in any order.
        progress: called with (requests done, of how many).
    Returns: one Answer per request in the order given, and {"packed_rows_read",
        "packed_rows_expected"}.
    Raises: EvaluationError if a request is empty, too long for the model, or gives logits that are
        not finite.
    Source: own.
    """
    _check(model, requests, settings)
    row = describe(subject, settings)
    pairs = [expected_pairs(row, r.fed_tokens, _chunk_starts(r, settings)) for r in requests]
    order = sorted(range(len(requests)), key=lambda i: -requests[i].fed_tokens)
    answers: list[Answer | None] = [None] * len(requests)
    rows_read = 0
    for first in range(0, len(order), settings.batch):
        part = order[first : first + settings.batch]
        cache = new_cache(subject, settings)
        logprobs = _score_batch(model, [requests[i] for i in part], cache, settings)
        for i, (logprob, greedy) in zip(part, logprobs, strict=True):
            answers[i] = Answer(logprob, greedy, pairs[i] > 0)
        if cache is not None:
            rows_read += cache.packed_rows_read
        progress(first + len(part), len(order))
    expected = row["packed_layers"] * sum(pairs)
    return answers, {"packed_rows_read": rows_read, "packed_rows_expected": expected}


def _check(model, requests: list[Request], settings: Settings) -> None:
    if settings.prefill == "fast" and settings.batch > 1:
        raise EvaluationError(
            "padding would move the chunk borders of fast mode",
            where="--prefill, --batch",
            expected="--batch 1, or --prefill strict",
            got=f"--prefill fast with --batch {settings.batch}",
            next_step="change one of them",
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for index, request in enumerate(requests):
        if not request.context or not request.continuation:
            raise EvaluationError(
                "a context or continuation has no tokens",
                where=f"request {index}",
                expected="at least one token in each",
                got=f"{len(request.context)} and {len(request.continuation)} tokens",
                next_step="correct or remove this item of the task file",
            )
        if limit is not None and request.fed_tokens + 1 > limit:
            raise EvaluationError(
                "context and answer do not fit the model",
                where=f"request {index}",
                expected=f"at most {limit} tokens",
                got=f"{request.fed_tokens + 1} tokens",
                next_step="use fewer shots or a smaller context length",
            )


@torch.inference_mode()
def _score_batch(
    model, requests: list[Request], cache, settings: Settings
) -> list[tuple[float, bool]]:
    width = max(request.fed_tokens for request in requests)
    tail = max(len(request.continuation) for request in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - request.fed_tokens :] = torch.tensor(
            (request.context + request.continuation)[:-1]
        )
        mask[row, width - request.fed_tokens :] = 1
    logits = _last_logits(model, ids, mask, tail, cache, settings)  # [B, tail, vocab]
    logprobs = F.log_softmax(logits.float(), dim=-1).cpu()
    results = []
    for row, request in enumerate(requests):
        targets = torch.tensor(request.continuation)
        own = logprobs[row, tail - len(targets) :]
        if not bool(torch.isfinite(own).all()):
            raise EvaluationError(
                "the logits are not finite",
                where=f"a sequence of {request.fed_tokens} tokens",
                expected="finite numbers",
                got="NaN or Inf",
                next_step=NOT_FINITE_NEXT,
            )
        chosen = own.gather(1, targets[:, None])
        results.append((chosen.double().sum().item(), bool((own.argmax(-1) == targets).all())))
    return results


def _last_logits(model, ids, mask, tail: int, cache, settings: Settings) -> torch.Tensor:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ids, mask, positions = (tensor.to(settings.device) for tensor in (ids, mask, positions))
    kwargs = cache.as_kwargs(model) if cache is not None else {"use_cache": False}
    width = ids.shape[1]
    for start, end in pairwise(
        _borders(width, tail, settings) if cache is not None else [0, width]
    ):
        output = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            logits_to_keep=tail if end == width else 1,
            **kwargs,
        )
    return output.logits


def _chunk_starts(request: Request, settings: Settings) -> list[int]:
    """Chunk borders of fast mode: the cache cuts the tokens of one call every chunk_tokens again.

    The last call is longer than that where the continuation is.
    """
    borders = _borders(request.fed_tokens, len(request.continuation), settings)
    return [
        position
        for start, end in pairwise(borders)
        for position in range(start, end, settings.chunk_tokens)
    ]


def _borders(width: int, tail: int, settings: Settings) -> list[int]:
    """Borders of the calls; the last one holds just the tokens whose logits are needed."""
    return [*range(0, width - tail, settings.chunk_tokens), width - tail, width]

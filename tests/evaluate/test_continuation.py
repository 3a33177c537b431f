import pytest
import torch

from quantmla.config import KVScheme
from quantmla.errors import EvaluationError
from quantmla.evaluate.continuation import Request, answer_requests
from quantmla.evaluate.model import Settings, Subject, loaded

LENGTHS = ((40, 3), (150, 1), (7, 9), (210, 4))


@pytest.fixture(scope="module")
def requests():
    generator = torch.Generator().manual_seed(3)

    def ids(count):
        return torch.randint(0, 96, (count,), generator=generator).tolist()

    return [Request(ids(context), ids(continuation)) for context, continuation in LENGTHS]


@pytest.fixture(scope="module")
def model(model_folder):
    with loaded(model_folder, Settings()) as model:
        yield model


def answer(model, folder, requests, path="quantised", **settings):
    scheme = KVScheme.parse("c4r4") if path == "quantised" else None
    subject = Subject("rtn", folder, path=path, scheme=scheme)
    return answer_requests(model, subject, requests, Settings(**settings))


def test_expanded_scores_are_those_of_plain_transformers(model_folder, requests):
    # a model of its own: the packed attention of the other tests stays switched on
    with loaded(model_folder, Settings()) as model, torch.no_grad():
        answers, counters = answer(model, model_folder, requests, path="expanded", batch=3)
        for request, got in zip(requests, answers, strict=True):
            ids = torch.tensor([request.context + request.continuation])
            logprobs = model(ids).logits[0, len(request.context) - 1 : -1].log_softmax(-1)
            targets = torch.tensor(request.continuation)
            expected = logprobs.gather(1, targets[:, None]).sum().item()
            assert got.logprob == pytest.approx(expected, abs=1e-3)
            assert got.greedy == bool((logprobs.argmax(-1) == targets).all())
    assert counters == {"packed_rows_read": 0, "packed_rows_expected": 0}


def test_batches_and_chunks_do_not_change_answers(model, model_folder, requests):
    alone, counters = answer(model, model_folder, requests)
    for settings in ({"batch": 4}, {"batch": 2, "chunk_tokens": 50}, {"chunk_tokens": 1}):
        together, counted = answer(model, model_folder, requests, **settings)
        assert counted == counters
        for one, other in zip(alone, together, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert (one.greedy, one.packed) == (other.greedy, other.packed)


def test_packed_is_told_per_request(model, model_folder, requests):
    answers, counters = answer(model, model_folder, requests)
    assert [a.packed for a in answers] == [False, True, False, True]
    fed = [context + continuation - 1 for context, continuation in LENGTHS]
    pairs = sum(max(0, i + 1 - 132) for n in fed for i in range(n))
    assert counters == {"packed_rows_read": 2 * pairs, "packed_rows_expected": 2 * pairs}


def test_greedy_means_what_decoding_gives(model, model_folder, requests):
    from quantmla.evaluate.model import new_cache

    context = requests[3].context
    subject = Subject("rtn", model_folder, scheme=KVScheme.parse("c2r2"))
    cache = new_cache(subject, Settings())
    kwargs, ids, decoded = cache.as_kwargs(model), torch.tensor([context]), []
    with torch.no_grad():
        for _ in range(5):
            ids = model(ids, **kwargs).logits[:, -1:].argmax(-1)
            decoded.append(ids.item())
    wrong = [*decoded[:4], (decoded[4] + 1) % 96]
    pair = [Request(context, decoded), Request(context, wrong)]
    answers, _ = answer_requests(model, subject, pair, Settings(batch=2))
    assert [a.greedy for a in answers] == [True, False]


def test_unusable_requests_are_refused(model, model_folder):
    for request in (Request([], [1]), Request([1], [])):
        with pytest.raises(EvaluationError, match="no tokens"):
            answer(model, model_folder, [request])
    with pytest.raises(EvaluationError, match="at most 512 tokens"):
        answer(model, model_folder, [Request([1] * 512, [1])])


def test_padding_and_fast_mode_do_not_go_together(model, model_folder, requests):
    with pytest.raises(EvaluationError, match="chunk borders"):
        answer(model, model_folder, requests, prefill="fast", batch=2)
    for chunk in (64, 3):  # continuations of up to 9 tokens are cut again inside the cache
        _, counters = answer(model, model_folder, requests, prefill="fast", chunk_tokens=chunk)
        assert counters["packed_rows_read"] == counters["packed_rows_expected"] > 0


def test_a_long_continuation_in_fast_mode_counts_as_it_is_cut(model, model_folder):
    request = Request(list(range(90)), [token % 96 for token in range(200)])
    _, counters = answer(model, model_folder, [request], prefill="fast", chunk_tokens=50)
    assert counters["packed_rows_read"] == counters["packed_rows_expected"] > 0

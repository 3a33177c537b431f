"""Any sequence of calls on a paged cache against a plain list of tokens for each request."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_rows import N_ROWS, ROWS, SINK, SLACK, WINDOW, check_tokens, paged, token_bytes, write
from quantmla.cache.layout import PAGE_TOKENS
from quantmla.errors import CacheError

RING = WINDOW + SLACK
N_SLOTS = 4
PICK = st.integers(0, 59)
COUNTS = st.one_of(st.integers(0, 4), st.sampled_from([7, 8, 9, 63, 64, 65, 150]))


@dataclass
class Model:
    """A request: its tokens, and which position and token each ring row holds."""

    tokens: list = field(default_factory=list)
    ring: dict = field(default_factory=dict)

    def append(self, tokens):
        for token in tokens:
            position = len(self.tokens)
            self.tokens.append(token)
            if position >= SINK:
                self.ring[(position - SINK) % RING] = (position, token)

    def finds(self, tokens, query):
        """Tell whether a query at this position finds its rows when there are so many tokens."""
        positions = range(max(SINK, query - WINDOW + 1), tokens)
        rows = (self.ring.get((p - SINK) % RING) for p in positions)
        return [(p, self.tokens[p]) for p in positions] == list(rows)


class PagedMachine(RuleBasedStateMachine):
    page_tokens, n_pages = 64, 8

    def __init__(self):
        super().__init__()
        self.cache = paged(self.n_pages, N_SLOTS, page_tokens=self.page_tokens)
        self.models, self.copies, self.next_id, self.next_token = {}, [], 0, 0

    def pick(self, number):
        return sorted(self.models)[number % len(self.models)]

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def pages(self):
        """Pages of each request, from the block table."""
        tables = {}
        for request, model in self.models.items():
            n_pages = -(-len(model.tokens) // self.page_tokens)
            plan = self.cache.read([request], query_tokens=0)
            tables[request] = plan.block_table[0, :n_pages].tolist()
        return tables

    def refused(self, call, words):
        before = (self.pages(), self.cache.free_pages)
        with pytest.raises(CacheError, match=words):
            call()
        assert (self.pages(), self.cache.free_pages) == before

    @rule()
    def add(self):
        request = self.new_id()
        if len(self.models) == N_SLOTS:
            self.refused(lambda: self.cache.add(request), "slots")
        else:
            self.cache.add(request)
            self.models[request] = Model()

    @precondition(lambda self: self.models)
    @rule(picks=st.lists(st.tuples(PICK, COUNTS), min_size=1, max_size=4))
    def extend(self, picks):
        counts = {self.pick(number): count for number, count in picks}
        if self.pages_needed(counts) > self.cache.free_pages:
            self.refused(lambda: self.cache.extend(counts), "pages of the cache are used up")
            return
        plan, tokens = self.cache.extend(counts), []
        for request, count in counts.items():
            new = [(self.next_token + i) % N_ROWS for i in range(count)]
            self.next_token += count
            self.models[request].append(new)
            tokens += new
        write(self.cache, plan, tokens)

    def pages_needed(self, counts):
        tables, needed = self.pages(), 0
        for request, count in counts.items():
            tokens = len(self.models[request].tokens)
            needed += -(-(tokens + count) // self.page_tokens) - len(tables[request])
            if count and tokens % self.page_tokens:
                page = tables[request][-1]
                if sum(page in table for table in tables.values()) > 1:
                    needed += 1
                    tables[request] = tables[request][:-1]
        return needed

    @precondition(lambda self: self.models)
    @rule(number=PICK)
    def fork(self, number):
        request, child = self.pick(number), self.new_id()
        if len(self.models) == N_SLOTS:
            self.refused(lambda: self.cache.fork(request, child), "slots")
        else:
            self.cache.fork(request, child)
            self.models[child] = copy.deepcopy(self.models[request])

    @precondition(lambda self: self.models)
    @rule(number=PICK, dropped=st.integers(0, 8))
    def truncate(self, number, dropped):
        self.roll_back(number, lambda model: max(0, len(model.tokens) - dropped))

    @precondition(lambda self: self.models)
    @rule(number=PICK, share=st.integers(0, 99))
    def truncate_far(self, number, share):
        self.roll_back(number, lambda model: len(model.tokens) * share // 100)

    @precondition(lambda self: self.models)
    @rule(number=PICK, tokens=st.integers(0, SINK + 1))
    def truncate_to_the_sinks(self, number, tokens):
        self.roll_back(number, lambda model: min(tokens, len(model.tokens)))

    def roll_back(self, number, target):
        request = self.pick(number)
        model = self.models[request]
        tokens = target(model)
        if model.finds(tokens, query=tokens):
            self.cache.truncate(request, tokens)
            del model.tokens[tokens:]
        else:
            self.refused(lambda: self.cache.truncate(request, tokens), "were overwritten")

    @precondition(lambda self: self.models)
    @rule(number=PICK)
    def free(self, number):
        request = self.pick(number)
        self.cache.free(request)
        del self.models[request]
        self.refused(lambda: self.cache.free(request), "not in the cache")

    @precondition(lambda self: self.models)
    @rule(number=PICK)
    def offload(self, number):
        request = self.pick(number)
        self.copies.append((self.cache.offload(request), self.models.pop(request)))

    @precondition(lambda self: self.copies)
    @rule(number=PICK)
    def restore(self, number):
        host, model = self.copies[number % len(self.copies)]
        request = self.new_id()
        if len(self.models) == N_SLOTS:
            self.refused(lambda: self.cache.restore(request, host), "slots")
        elif -(-len(model.tokens) // self.page_tokens) > self.cache.free_pages:
            self.refused(lambda: self.cache.restore(request, host), "pages")
        else:
            self.cache.restore(request, host)  # may be repeated: a copy is not used up
            self.models[request] = copy.deepcopy(model)

    @invariant()
    def every_byte_is_right(self):
        tables = self.pages()
        used = {page for table in tables.values() for page in table}
        assert self.cache.free_pages == self.n_pages - len(used)
        plan = self.cache.read(list(self.models), query_tokens=0)
        slots = plan.row_slots.tolist()
        assert len(set(slots)) == len(self.models)
        for (request, model), slot in zip(self.models.items(), slots, strict=True):
            tokens = len(model.tokens)
            assert model.finds(tokens, query=tokens)
            if model.finds(tokens, query=tokens - 1):
                check_tokens(self.cache, request, model.tokens)
            else:  # rolled back by slack + 1: only the window of the next token is whole
                with pytest.raises(CacheError, match="rows that these queries read"):
                    self.cache.read([request])
                self.check_bytes(tables[request], model.tokens)
            live = [(row, p, t) for row, (p, t) in model.ring.items() if p < tokens]
            for layer, source in enumerate(ROWS):
                rows = self.cache.pool(layer)[1][slot]
                sinks = model.tokens[:SINK]
                assert torch.equal(rows[: len(sinks)], source.rows[sinks])
                ring = rows[[SINK + row for row, _, _ in live]]
                assert torch.equal(ring, source.rows[[t for _, _, t in live]])
        self.poison(used, slots)

    def check_bytes(self, table, tokens):
        per_page = self.page_tokens // PAGE_TOKENS
        blobs = [page * per_page + i for page in table for i in range(per_page)]
        for layer, source in enumerate(ROWS):
            stored = token_bytes(source.layout, self.cache.pool(layer)[0][blobs])
            assert torch.equal(stored[: len(tokens)], source.bytes[tokens])

    def poison(self, used, slots):
        """Whoever reads a page or a slot that was given back reads NaN."""
        per_page = self.page_tokens // PAGE_TOKENS
        free = [p * per_page + i for p in set(range(self.n_pages)) - used for i in range(per_page)]
        for layer in range(len(ROWS)):
            pages, rows = self.cache.pool(layer)
            pages[free] = 0xFF
            rows[sorted(set(range(N_SLOTS)) - set(slots))] = float("nan")


class LargePageMachine(PagedMachine):
    page_tokens, n_pages = 128, 5


STEPS = settings(max_examples=25, stateful_step_count=25)
TestPaged = PagedMachine.TestCase
TestPaged.settings = STEPS
TestLargePages = LargePageMachine.TestCase
TestLargePages.settings = STEPS

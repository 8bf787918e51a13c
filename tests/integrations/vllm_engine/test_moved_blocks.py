"""Tests that blocks of raw keys can be reused at other positions. A subclass of vLLM's scheduler finds documents
anywhere in a prompt.

docs/dev/vllm.md says what such a subclass can and cannot do.
"""

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/run tests it in an environment of its own")

import torch
from engine import BOUND, engine
from flashrope import Rotary
from float64_model import HEAD_DIM, LAYERS, Float64Model, differences_by_step
from models import VOCABULARY, prompt, save_model
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler

PAGE = 16
REROPE = Rotary.rope(HEAD_DIM).rectify(64)


class DocumentScheduler(Scheduler):
    """Finds the documents of a request in the cache, wherever they are in the prompt.

    A request lists its documents as (start, stop) in tokens. Only documents that begin at the start of a block can be
    found. A step computes tokens up to the next document in the cache. The scheduler then preempts the request. When
    vLLM admits the request again, vLLM looks up its blocks again.
    """

    steps: list[list[int]] = []  # for every step, the number of tokens that each request computes

    def add_request(self, request):
        request._block_hasher = self._hashes
        request.block_hashes = []
        request.update_block_hashes()
        super().add_request(request)

    def schedule(self, *args, **kwargs):
        all_tokens = self.max_num_scheduled_tokens
        for request in list(self.running):
            if self._found(request, request.num_computed_tokens // PAGE) and not request.num_computed_tokens % PAGE:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
        for request in (*self.waiting, *self.running):
            if tokens := self._before_a_document(request):
                self.max_num_scheduled_tokens = min(self.max_num_scheduled_tokens, tokens)
        output = super().schedule(*args, **kwargs)
        self.max_num_scheduled_tokens = all_tokens
        self.steps.append(list(output.num_scheduled_tokens.values()))
        return output

    def _hashes(self, request) -> list[bytes]:
        return [self._hash(request, n) for n in range(len(request.block_hashes), request.num_tokens // PAGE)]

    def _hash(self, request, block: int) -> bytes:
        """Returns the hash of a block. If the block lies in a document, the hash covers the document's tokens up to the
        end of the block. Otherwise the hash covers all tokens up to the end of the block, and the bounds of the
        documents among them."""
        start, stop = block * PAGE, (block + 1) * PAGE
        documents = (request.sampling_params.extra_args or {}).get("documents", ())
        for first, last in documents:
            if not first % PAGE and first <= start and stop <= last:
                return sha256((kv_cache_utils.NONE_HASH, "document", tuple(request.all_token_ids[first:stop])))
        before = tuple(document for document in documents if document[0] < stop)
        return sha256((kv_cache_utils.NONE_HASH, before, tuple(request.all_token_ids[:stop])))

    def _found(self, request, block: int) -> bool:
        hashes, pool = request.block_hashes, self.kv_cache_manager.block_pool
        below_the_last_token = block < (request.num_tokens - 1) // PAGE
        return below_the_last_token and pool.get_cached_block(hashes[block], [0]) is not None

    def _before_a_document(self, request) -> int:
        """Returns how many tokens to compute before the next document that is in the cache, or 0 if no such document
        follows."""
        block, last = request.num_computed_tokens // PAGE, (request.num_tokens - 1) // PAGE
        while not request.num_computed_tokens and self._found(request, block):
            block += 1
        found = next((n for n in range(block, last) if self._found(request, n)), block)
        return (found - block) * PAGE


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def ask(llm, *requests):
    """Returns the outputs for requests (tokens, documents). Afterwards DocumentScheduler.steps has the steps of these
    requests."""
    DocumentScheduler.steps.clear()
    common = dict(max_tokens=6, temperature=0.0, logprobs=VOCABULARY, detokenize=False, ignore_eos=True)
    params = [SamplingParams(**common, extra_args={"documents": documents}) for _, documents in requests]
    return llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)


def placed(folder, scheme, parts) -> Float64Model:
    """Returns a model whose cache holds these parts one after another. Each part was computed without the other
    parts."""
    caches = []
    for part in parts:
        model = Float64Model(folder, scheme)
        model.step(part)
        caches.append(model.cache)
    model.cache = [torch.cat([cache[n] for cache in caches], dim=1) for n in range(LAYERS)]
    return model


X, Y, QUESTION = prompt(64, seed=1), prompt(96, seed=2), prompt(20, seed=5)
SETTINGS = dict(block_size=PAGE, scheduler_cls=DocumentScheduler, max_num_seqs=4)


def test_documents_at_other_positions(qwen2):
    """Documents are found in another order, after tokens that are not in the cache, and while a request without
    documents runs. A document that begins inside a block is not found. If a request has the same tokens but lists
    no documents, it does not hit the blocks of the documents."""
    system, other, short = prompt(32, seed=4), prompt(45, seed=6), X[:50]
    with engine(qwen2, {"rerope": 64}, **SETTINGS) as llm:
        ask(llm, (X + QUESTION, [(0, 64)]), (Y + QUESTION, [(0, 96)]))
        (swapped,) = ask(llm, (Y + X + QUESTION, [(0, 96), (96, 160)]))
        assert DocumentScheduler.steps[0] == [20] and swapped.num_cached_tokens == 160
        behind, beside = ask(llm, (system + X + Y + QUESTION, [(32, 96), (96, 192)]), (other, []))
        assert DocumentScheduler.steps[:2] == [[32], [20, 45]]
        (within,) = ask(llm, (short + Y + QUESTION, [(0, 50), (50, 146)]))
        (plain,) = ask(llm, (Y + X + QUESTION, []))
    assert within.num_cached_tokens == 48 and plain.num_cached_tokens == 0
    assert differences_by_step(placed(qwen2, REROPE, [Y, X]), swapped, [QUESTION]) <= BOUND
    assert differences_by_step(placed(qwen2, REROPE, [system, X, Y]), behind, [QUESTION]) <= BOUND
    assert differences_by_step(Float64Model(qwen2, REROPE), beside, [other]) <= BOUND
    everything = Float64Model(qwen2, REROPE)
    assert differences_by_step(everything, swapped, [Y + X + QUESTION]) > 0.1  # X has not seen Y


def test_rotated_keys_stay_where_they_were(qwen2):
    """Rotated keys cannot be moved. Without raw_keys, the cache holds keys that were rotated to the positions of the
    request that computed them."""
    with engine(qwen2, {}, **SETTINGS) as llm:
        ask(llm, (X + QUESTION, [(0, 64)]), (Y + QUESTION, [(0, 96)]))
        (output,) = ask(llm, (Y + X + QUESTION, [(0, 96), (96, 160)]))
    assert output.num_cached_tokens == 160
    assert differences_by_step(placed(qwen2, Rotary.rope(HEAD_DIM), [Y, X]), output, [QUESTION]) > 0.1

"""Steps of vLLM's scheduler, without the work that changes nothing.

In most steps a running request only counts on: its last KV block has room, and its token neither fills that block nor ends the
response. vLLM finds that out through some 100 calls per request and step, and tells its front end of every token.

    schedule            the requests that count on: three counters each, here
                        the others: vLLM's own ``schedule``, as if no more were running; then one batch of both, in their order
    update_from_output  a token that changes nothing else: appended, here
                        the others (first and last ones, and where a block is full): vLLM's own
    outputs             those of vLLM's own, with the tokens appended since; a response that is wanted whole needs no more

What is decided is the same, to the block, whichever way a request goes; ``tests/vllm/test_vllm_scheduler.py`` compares each step.
Where this applies is up to `vllm_process.shorten_steps`.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy


class ShortSteps:
    """Takes over three methods of a vLLM ``Scheduler``.

    Args:
        scheduler: to change.
        ahead: whether it is an ``AsyncScheduler``, which schedules a step before the tokens of the last one are known.
    """

    def __init__(self, scheduler: Any, ahead: bool) -> None:
        self._scheduler, self._ahead = scheduler, ahead
        self._add_request, self._schedule, self._update = (
            scheduler.add_request,
            scheduler.schedule,
            scheduler.update_from_output,
        )
        scheduler.add_request, scheduler.schedule = self.add_request, self.schedule
        scheduler.update_from_output = self.update_from_output

    def add_request(self, request: Any) -> None:
        """Note until how many tokens a request may count on, and until which its outputs may wait: 0 if it may not."""
        params = request.sampling_params
        request.counts_until = request.silent_until = request.told = 0
        request.kept = None
        if not (params is None or request.mm_features or request.structured_output_request or request.resumable):
            request.counts_until = min(request.num_prompt_tokens + request.max_tokens, self._scheduler.max_model_len)
            request.ends = {params.eos_token_id, *(params.stop_token_ids or ())}
            whole = params.output_kind.name == "FINAL_ONLY" and not params.detokenize
            more = (params.prompt_logprobs, params.repetition_detection) != (None, None)
            if whole and not more and params.num_logprobs in (None, 0):
                request.silent_until = request.counts_until
                request.kept = None if params.num_logprobs is None else []
        self._add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """See the module. Only where each running request has one token to compute, and nothing new could be admitted."""
        own = self._scheduler
        running, waiting, block = own.running, own.waiting, own.block_size
        full = len(running) >= getattr(own, "max_num_active_reqs", own.max_num_running_reqs)
        if (
            not 1 < len(running) <= own.max_num_scheduled_tokens
            or len(own.requests) != len(running) + len(waiting)
            or (waiting and not full)
            or own._pause_state.name != "UNPAUSED"
        ):
            return self._schedule(throttle_prefills)
        seen = own.requests if own.use_v2_model_runner else own.prev_step_scheduled_req_ids
        ids, computed, outputs = [], [], []
        counting, others, places = [], [], []
        for place, request in enumerate(running):
            name, done, known = request.request_id, request.num_computed_tokens, len(request._all_token_ids)
            if known + request.num_output_placeholders - done != 1 or request.is_prefill_chunk:
                return self._schedule(throttle_prefills)
            ids.append(name)
            computed.append(done)
            outputs.append(done + 1 - request.num_prompt_tokens)
            if (
                done + 2 < request.counts_until
                and done % block
                and known % block
                and place  # the first goes vLLM's way: through it older versions find the prefix that all share
                and name in seen
            ):
                counting.append(request)
            else:
                others.append(request)
                places.append(place)
        if len(others) > own.kv_cache_manager.block_pool.get_num_free_blocks():
            return self._schedule(throttle_prefills)

        own.running, own.waiting = others, type(waiting)()
        try:
            output = self._schedule(throttle_prefills)
        finally:
            own.running, own.waiting = running, waiting

        for request in counting:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self._ahead
        _fill(output, ids, computed, outputs, places)
        if not own.use_v2_model_runner:
            own.prev_step_scheduled_req_ids.update(ids)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """See the module. Tokens that vLLM's front end was not told of are lost to it if the request is aborted."""
        own, block, ahead = self._scheduler, self._scheduler.block_size, self._ahead
        tokens, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        log_probs = model_runner_output.logprobs
        row_each = log_probs is not None and log_probs.cu_num_generated_tokens is None
        columns = _columns(log_probs) if row_each else None
        noted = bool(not tokens or model_runner_output.num_nans_in_logits)
        others, known = {}, {}
        for name, number in scheduler_output.num_scheduled_tokens.items():
            request = own.requests.get(name)
            if request is not None and request.told and not request.num_preemptions and not noted:
                row = rows[name]
                new, held, kept = tokens[row], request._all_token_ids, request.kept
                length = len(held) + 1
                if (
                    length < request.silent_until
                    and length % block
                    and len(new) == 1
                    and new[0] not in request.ends
                    and (kept is None or row_each)
                ):
                    held.append(new[0])
                    request._output_token_ids.append(new[0])
                    request.num_in_flight_tokens -= 1
                    request.num_output_placeholders -= ahead
                    if ahead and length % block == 1:  # else `schedule` saw that a block is full
                        done = request.num_computed_tokens - request.num_output_placeholders
                        own.kv_cache_manager.cache_blocks(request, done)
                    if kept is not None:
                        kept.append((columns, row))
                    continue
            others[name], known[name] = number, request
        rest = copy(scheduler_output)
        rest.num_scheduled_tokens = others
        result = self._update(rest, model_runner_output)
        for outputs in result.values():
            for output in outputs.outputs:
                request = known.get(output.request_id)
                if request is not None and request.silent_until:
                    output.new_token_ids = request._output_token_ids[request.told :]
                    request.told = len(request._output_token_ids)
                    if request.kept:
                        output.new_logprobs = _joined(request.kept, output.new_logprobs)
                        request.kept = []
        return result


def _fill(output: Any, ids: list[str], computed: list[int], outputs: list[int], places: list[int]) -> None:
    """Make a batch of the requests at ``places``, or of those that are in it, one of all."""
    batch = output.scheduled_cached_reqs
    given, blocks = dict(zip(batch.req_ids, batch.new_block_ids, strict=True)), [None] * len(ids)
    for place in reversed(places):
        if ids[place] in given:
            blocks[place] = given[ids[place]]
        else:  # all of its tokens are under way
            del ids[place], computed[place], outputs[place], blocks[place]
    batch.req_ids, batch.new_block_ids = ids, blocks
    batch.num_computed_tokens, batch.num_output_tokens = computed, outputs
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = dict.fromkeys(ids, 1), len(ids)


def _columns(log_probs: Any) -> list[Any]:
    """Ids, values and ranks of the sampled tokens, a row per request: copies, as the runner's own lie in page-locked memory,
    which it would have to allocate anew in each step."""
    return [(part[:, 0] if part.ndim > 1 else part).copy() for part in log_probs[:3]]


def _joined(kept: list[tuple[list[Any], int]], last: Any) -> Any:
    """``LogprobsLists`` of one request, of sampled tokens only: its rows in steps, then those of its last step."""
    ids, values, ranks = (
        numpy.concatenate([*(columns[i][row : row + 1] for columns, row in kept), part])
        for i, part in enumerate(_columns(last))
    )
    return type(last)(ids[:, None], values[:, None], ranks)

"""The Triton kernel of `tree_sample`.

One program walks one row. Whether a sibling is accepted takes two numbers of the whole distributions. Only a rejection
takes a pass over the vocabulary, which writes down what is left of the target's distribution, adds up its mass, and
draws from it at once: the draw does not need the mass, and if no sibling follows it stands. Where nothing was rejected
there is one pass, to draw.

What is left lies in scratch, before it is divided by its mass. There a token that a rejection took out of the draft's
distribution (siblings without replacement) is marked with a negative number: its own mass is 0, for it was rejected
because q had more of it than p.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl


@triton.jit
def _first_of_greatest(value, index):
    """Return the least index among the greatest values of a block."""
    greatest = tl.max(value, axis=0)
    return tl.min(tl.where(value == greatest, index, 2147483647), axis=0)


@triton.jit
def tree_sample_kernel(
    probs_ptr,  # [B, N, V], contiguous
    token_ids_ptr,  # [B, N], contiguous
    parents_ptr,  # [B, N], contiguous
    draft_probs_ptr,  # [B, P, V], contiguous; not read if TOP
    draft_index_ptr,  # [B, N], contiguous; not read if TOP
    uniform_ptr,  # [B, N], contiguous
    exponential_ptr,  # [B, V], contiguous
    left_ptr,  # [B, V], contiguous: scratch
    node_ptr,  # [B]: result
    token_ptr,  # [B]: result
    num_nodes,
    num_distributions,
    vocab_size,
    TOP: tl.constexpr,
    REPLACED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parents_ptr += row * num_nodes
    if tl.load(parents_ptr) == -2:
        tl.store(node_ptr + row, -1)
        tl.store(token_ptr + row, 0)
        return
    probs_ptr += row * num_nodes * vocab_size
    token_ids_ptr += row * num_nodes
    draft_probs_ptr += row * num_distributions * vocab_size
    draft_index_ptr += row * num_nodes
    uniform_ptr += row * num_nodes
    exponential_ptr += row * vocab_size
    left_ptr += row * vocab_size
    lane = tl.arange(0, BLOCK)

    node = 0
    fresh = vocab_size  # how much of the distribution after the node stands as it was: all, or after a rejection none
    drawn = 0  # the token behind it, if a child was rejected
    mass = 1.0  # of what is left
    draft_mass = 1.0  # of the draft's distribution without the siblings that were taken out of it
    for child in range(1, num_nodes):
        if tl.load(parents_ptr + child).to(tl.int32) == node:
            token = tl.load(token_ids_ptr + child).to(tl.int64)
            after = probs_ptr + node.to(tl.int64) * vocab_size
            p = tl.load(after + token, mask=token < fresh, other=0.0)
            p += tl.maximum(tl.load(left_ptr + token, mask=token >= fresh, other=0.0), 0.0) / mass
            q = 1.0
            draft = draft_probs_ptr
            if not TOP:
                draft += tl.load(draft_index_ptr + node).to(tl.int64) * vocab_size
                q = tl.load(draft + token) / draft_mass
            accepted = tl.load(uniform_ptr + child) * q < p
            if not accepted:
                masses = tl.zeros([BLOCK], tl.float32)
                draft_masses = tl.zeros([BLOCK], tl.float32)
                earliest = tl.full([BLOCK], -1.0, tl.float32)
                earliest_at = tl.zeros([BLOCK], tl.int32)
                for start in range(0, vocab_size, BLOCK):
                    at = start + lane
                    inside = at < vocab_size
                    before = tl.load(after + at, mask=at < fresh, other=0.0)
                    before += tl.load(left_ptr + at, mask=inside & (at >= fresh), other=0.0)
                    taken = (before < 0.0) | (at == token)
                    p_left = tl.maximum(before, 0.0) / mass
                    if TOP:
                        p_left = tl.where(at == token, 0.0, p_left)
                    else:
                        draft_left = tl.load(draft + at, mask=inside, other=0.0)
                        if not REPLACED:
                            draft_left = tl.where(before < 0.0, 0.0, draft_left)
                            draft_masses += tl.where(taken, 0.0, draft_left)
                        p_left = tl.maximum(p_left - draft_left / draft_mass, 0.0)
                    masses += p_left
                    wait = tl.load(exponential_ptr + at, mask=inside, other=1.0)
                    arrival = tl.where(p_left > 0.0, p_left / wait, -1.0)
                    earlier = arrival > earliest
                    earliest = tl.where(earlier, arrival, earliest)
                    earliest_at = tl.where(earlier, at, earliest_at)
                    if not TOP and not REPLACED:
                        p_left = tl.where(taken, -1.0, p_left)
                    tl.debug_barrier()  # every thread has read what this block overwrites, and its own alone
                    tl.store(left_ptr + at, p_left, mask=inside)
                tl.debug_barrier()  # threads read what others have written
                mass = tl.sum(masses, axis=0)
                if not TOP and not REPLACED:
                    draft_mass = tl.sum(draft_masses, axis=0)
                drawn = _first_of_greatest(earliest, earliest_at)
                fresh = 0
                accepted = (mass > 0.0) == 0
            if accepted:
                node = child
                fresh = vocab_size
                mass = 1.0
                draft_mass = 1.0

    if fresh > 0:
        earliest = tl.full([BLOCK], -1.0, tl.float32)
        earliest_at = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            at = start + lane
            inside = at < vocab_size
            p_left = tl.load(probs_ptr + node.to(tl.int64) * vocab_size + at, mask=inside, other=0.0)
            wait = tl.load(exponential_ptr + at, mask=inside, other=1.0)
            arrival = tl.where(p_left > 0.0, p_left / wait, -1.0)
            earlier = arrival > earliest
            earliest = tl.where(earlier, arrival, earliest)
            earliest_at = tl.where(earlier, at, earliest_at)
        drawn = _first_of_greatest(earliest, earliest_at)
    tl.store(node_ptr + row, node)
    tl.store(token_ptr + row, drawn)

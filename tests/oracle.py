"""Literal recurrences, one node at a time: what the operators are held against.

Nothing here uses the closed form. Each node copies the state (or the sequence) of its parent and takes one step, as a
model that decodes the node's path token by token would. Float64 unless told otherwise: `dtype=torch.float32` gives the
error that the recurrence itself has.
"""

import torch
from torch import Tensor

PADDING = -2


def l2norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)


def _per_value_head(x: Tensor, value_heads: int) -> Tensor:
    """`[HK, K]` to `[HV, K]`, head by head."""
    ratio = value_heads // x.shape[0]
    return torch.stack([x[head // ratio] for head in range(value_heads)])


def _write(state: Tensor, decay: Tensor, key: Tensor, pseudo_value: Tensor) -> Tensor:
    """One write to `[HV, K, V]`: decay the state, add an outer product a head."""
    return decay.exp()[:, None, None] * state + key[:, :, None] * pseudo_value[:, None, :]


def solve(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    prefix_pseudo_value: Tensor,
    prefix_key: Tensor,
    prefix_log_decay: Tensor,
    prefix_mask: Tensor,
    scale: float,
    qk_l2norm: bool,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[dict[int, Tensor]]]:
    """Return the four results of `tree_wy_solve`, and the states `[HV, K, V]` after each node of each row."""
    value, query, key, log_decay, beta, committed_state = (
        x.to(dtype) for x in (value, query, key, log_decay, beta, committed_state)
    )
    prefix_pseudo_value, prefix_key, prefix_log_decay = (
        x.to(dtype) for x in (prefix_pseudo_value, prefix_key, prefix_log_decay)
    )
    value_heads = value.shape[2]
    output, pseudo_value = torch.zeros_like(value), torch.zeros_like(value)
    key_as_used, path_log_decay = torch.zeros_like(key), torch.zeros_like(log_decay)
    states: list[dict[int, Tensor]] = []
    for row, row_parents in enumerate(parents.tolist()):
        after: dict[int, Tensor] = {}
        for node, parent in enumerate(row_parents):
            if parent == PADDING:
                continue
            if parent >= 0:
                state, decayed = after[parent].clone(), path_log_decay[row, parent].clone()
            else:
                state, decayed = committed_state[row].clone(), torch.zeros_like(log_decay[row, node])
                for known in prefix_mask[row, node].nonzero().flatten().tolist():
                    known_key = _per_value_head(prefix_key[row, known], value_heads)
                    state = _write(state, prefix_log_decay[row, known], known_key, prefix_pseudo_value[row, known])
                    decayed = decayed + prefix_log_decay[row, known]
            k, q = key[row, node], query[row, node]
            if qk_l2norm:
                k, q = l2norm(k), l2norm(q)
            key_as_used[row, node] = k
            k, q = _per_value_head(k, value_heads), _per_value_head(q, value_heads)
            gate = log_decay[row, node]
            seen = torch.einsum("hkv,hk->hv", gate.exp()[:, None, None] * state, k)
            u = beta[row, node][:, None] * (value[row, node] - seen)
            after[node] = _write(state, gate, k, u)
            output[row, node] = torch.einsum("hkv,hk->hv", after[node], q) * scale
            pseudo_value[row, node] = u
            path_log_decay[row, node] = decayed + gate
        states.append(after)
    return output, pseudo_value, key_as_used, path_log_decay, states


def commit(
    committed_state: Tensor,
    pseudo_value: Tensor,
    key: Tensor,
    log_decay: Tensor,
    parents: Tensor,
    accepted_node: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Write the accepted path of each row, root first, one node at a time."""
    result = committed_state.to(dtype, copy=True)
    value_heads = committed_state.shape[1]
    for row, node in enumerate(accepted_node.tolist()):
        for step in path(parents[row].tolist(), node):
            step_key = _per_value_head(key[row, step].to(dtype), value_heads)
            result[row] = _write(
                result[row], log_decay[row, step].to(dtype), step_key, pseudo_value[row, step].to(dtype)
            )
    return result


def path(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to `node`; none for a node of -1 or of padding."""
    nodes: list[int] = []
    while node >= 0 and parents[node] != PADDING:
        nodes.insert(0, node)
        node = parents[node]
    return nodes


def conv(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor,
    parents: Tensor,
    activation: str,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Lay the window and the path of each node out as a sequence, and take the last output of a causal convolution."""
    result = torch.zeros_like(x, dtype=dtype)
    taps = weight.shape[1]
    for row, row_parents in enumerate(parents.tolist()):
        for node in range(x.shape[1]):
            nodes = path(row_parents, node)
            if not nodes:
                continue
            before = torch.zeros(x.shape[2], taps, dtype=dtype)
            sequence = torch.cat([before, window[row].to(dtype), x[row, nodes].to(dtype).T], dim=1)
            total = (sequence[:, -taps:] * weight.to(dtype)).sum(1)
            if bias.shape[0]:
                total = total + bias.to(dtype)
            result[row, node] = total * torch.sigmoid(total) if activation == "silu" else total
    return result


def conv_commit(window_pool: Tensor, slots: Tensor, x: Tensor, parents: Tensor, accepted_node: Tensor) -> Tensor:
    """Append the columns of each accepted path to the window of its slot, and drop as many old ones."""
    result = window_pool.clone()
    for row, slot in enumerate(slots.tolist()):
        for node in path(parents[row].tolist(), int(accepted_node[row])):
            if slot >= 0:
                column = x[:, row, node, :, None].to(result.dtype)
                result[:, slot] = torch.cat([result[:, slot, :, 1:], column], dim=-1)
    return result


def kv_commit(pool: Tensor, slots: Tensor, start: Tensor, parents: Tensor, accepted_node: Tensor) -> Tensor:
    """Copy the columns of each accepted path, one by one, to the front of its nodes. For keys and values alike."""
    result = pool.clone()
    for row, slot in enumerate(slots.tolist()):
        for place, node in enumerate(path(parents[row].tolist(), int(accepted_node[row]))):
            if slot >= 0:
                first = int(start[row])
                result[:, slot, :, first + place] = pool[:, slot, :, first + node]
    return result


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_start: Tensor,
    prefix_length: Tensor,
    parents: Tensor,
    scale: float,
    window: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attend from each node and head to the sequence that ends with the node, or to the last tokens of it."""
    result = torch.zeros_like(query, dtype=dtype)
    ratio = query.shape[2] // key.shape[2]
    for row, row_parents in enumerate(parents.tolist()):
        start, stop = int(prefix_start[row]), int(prefix_start[row] + prefix_length[row])
        for node in range(query.shape[1]):
            nodes = path(row_parents, node)
            if not nodes:
                continue
            text = stop - start + len(nodes)
            seen = slice(max(text - window, 0) if window else 0, text)
            for head in range(query.shape[2]):
                group = head // ratio
                keys = torch.cat([key_cache[row, group, start:stop], key[row, nodes, group]])[seen].to(dtype)
                values = torch.cat([value_cache[row, group, start:stop], value[row, nodes, group]])[seen].to(dtype)
                weights = torch.softmax(keys @ query[row, node, head].to(dtype) * scale, 0)
                result[row, node, head] = weights @ values
    return result

"""Paged attention over packed sequences, prefill chunks and decode rows alike.

Keys are reduced in partitions of PARTITION positions from 0. Of a partition, for each query row,

    m = max s,   l = Σ 2^(s - m),   o = Σ 2^(s - m) v        s = q·k · scale · log2 e, keys it sees only

depend on nothing else, and partitions are folded in order:

    M' = max(M, m),   L' = L 2^(M - M') + l 2^(m - M'),   O' = O 2^(M - M') + o 2^(m - M')

So it does not matter which program computes a partition: a prefill tile folds as it goes, a decode row's
partitions may be spread over programs whose results `combine_kernel` folds in the same order. (Online
softmax: Milakov & Gimelshein 2018; split KV: Dao et al. 2023.)

The query heads of one KV head share a tile of ROWS rows: row r is head r % GROUP of query r // GROUP. A GROUP
that does not divide the tile leaves its last rows empty.
"""

import triton
import triton.language as tl


@triton.jit
def attend_partition(
    q, positions, keys_values, table, first_key, end_key, scale, stride_block, stride_kv, stride_slot,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    PARTITION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(m, l, o) of keys [first_key, first_key + PARTITION). q [ROWS, DIM], positions [ROWS] (-1: no query
    there). Without MASKED every row sees every key, and the arithmetic is the same."""
    keys = first_key + tl.arange(0, PARTITION)
    columns = tl.arange(0, DIM)
    in_head = columns < HEAD_DIM
    exists = keys < end_key
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    rows = blocks * stride_block + (keys % BLOCK_SIZE) * stride_slot
    k = tl.load(
        keys_values + rows[None, :] + columns[:, None], mask=in_head[:, None] & exists[None, :], other=0.0
    )
    v = tl.load(
        keys_values + stride_kv + rows[:, None] + columns[None, :],
        mask=exists[:, None] & in_head[None, :],
        other=0.0,
    )
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
    m = tl.max(scores, axis=1)
    floor = tl.where(m == float("-inf"), 0.0, m)
    weights = tl.exp2(scores - floor[:, None])
    return m, tl.sum(weights, axis=1), tl.dot(weights.to(v.dtype), v, input_precision="ieee")


@triton.jit
def scales(running_max, m):
    """(M', 2^(M - M'), 2^(m - M'))."""
    largest = tl.maximum(running_max, m)
    floor = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.exp2(running_max - floor), tl.exp2(m - floor)


@triton.jit
def find_sequence(query_starts, num_seqs, token, guess):
    """The last sequence that starts at or before `token`; `guess` costs two loads if it is right."""
    low = num_seqs * 0
    high = low + num_seqs
    bounded = tl.minimum(guess, num_seqs - 1)
    if tl.load(query_starts + bounded) <= token:
        if token < tl.load(query_starts + bounded + 1):
            low, high = bounded, bounded + 1
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_tile(query_starts, num_seqs, tile, QUERIES: tl.constexpr):
    """(sequence, tile within it): sequence s owns tiles from query_starts[s] // QUERIES + s on, enough for
    its queries; it may have one more, which is empty."""
    low = num_seqs * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(query_starts + low) // QUERIES + low)


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "num_splits", "stride_table", "most_partials"])
def attention_kernel(
    q, keys_values, out, partial_max, partial_sum, partial_out, query_starts, context_lens, tables, num_seqs,
    num_tiles, num_splits, scale, stride_block, stride_kv, stride_slot, stride_head, stride_table, num_heads,
    most_partials,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, PARTITION: tl.constexpr, PICK: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads, splits). q, out [num_tokens, num_heads, HEAD_DIM]; `keys_values` points at a
    layer of block 0, [2, BLOCK_SIZE, KV heads, HEAD_DIM]; tables [num_seqs, stride_table]; `scale` includes
    log2 e.

    PICK, what a tile is: "long": QUERIES positions of a sequence that has several; "token": one token;
    "single": one sequence, if it has one query only.
    KEEP: "all": fold and write `out` (one split); "each": write every partition's (m, l, o); "fold": fold
    those of this split and write one (m, l, o). Partials: [tiles, num_heads, most_partials(, HEAD_DIM)]
    fp32."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    tile = num_tiles - 1 - tl.program_id(0)  # long ones first
    if PICK == "token":
        sequence = find_sequence(query_starts, num_seqs, tile, tile)
        start = tl.load(query_starts + sequence)
        first_query = tile - start
    elif PICK == "single":
        sequence, first_query = tile, 0
        start = tl.load(query_starts + sequence)
    else:
        sequence, within = find_tile(query_starts, num_seqs, tile, QUERIES)
        start = tl.load(query_starts + sequence)
        first_query = within * QUERIES
    num_queries = tl.load(query_starts + sequence + 1) - start
    present = first_query < num_queries
    if PICK == "single":
        present = num_queries == 1
    elif PICK == "long":
        present = present & (num_queries > 1)
    if present:
        context_len = tl.load(context_lens + sequence)
        first_position = context_len - num_queries + first_query
        end_key = tl.minimum(first_position + QUERIES, context_len)

        rows, columns = tl.arange(0, ROWS), tl.arange(0, DIM)
        query, head = rows // GROUP, kv_head * GROUP + rows % GROUP
        valid = (query < QUERIES) & (first_query + query < num_queries)
        positions = tl.where(valid, first_position + query, -1)
        places = (start + first_query + query).to(tl.int64) * num_heads + head
        inside = valid[:, None] & (columns < HEAD_DIM)[None, :]
        loaded = tl.load(q + places[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)

        base = keys_values + kv_head * stride_head
        table = tables + sequence.to(tl.int64) * stride_table
        num_partitions = tl.cdiv(end_key, PARTITION)
        per_split = tl.cdiv(num_partitions, num_splits)
        first = split * per_split
        last = tl.minimum(first + per_split, num_partitions)
        # partitions that every row sees whole; rows without a query are not stored
        plain = tl.minimum((first_position + 1) // PARTITION, last)

        running_max = tl.full([ROWS], float("-inf"), tl.float32)
        running_sum = tl.zeros([ROWS], tl.float32)
        accumulator = tl.zeros([ROWS, DIM], tl.float32)
        partials = (tile.to(tl.int64) * num_heads + head) * most_partials
        for index in range(first, plain):
            m, l, o = attend_partition(
                loaded, positions, base, table, index * PARTITION, end_key, scale, stride_block, stride_kv,
                stride_slot, BLOCK_SIZE, HEAD_DIM, DIM, ROWS, PARTITION, False,
            )  # fmt: skip
            if KEEP == "each":
                tl.store(partial_max + partials + index, m, mask=valid)
                tl.store(partial_sum + partials + index, l, mask=valid)
                tl.store(
                    partial_out + (partials + index)[:, None] * HEAD_DIM + columns[None, :], o, mask=inside
                )
            else:
                running_max, before, after = scales(running_max, m)
                running_sum = running_sum * before + l * after
                accumulator = accumulator * before[:, None] + o * after[:, None]
        for index in range(tl.maximum(first, plain), last):
            m, l, o = attend_partition(
                loaded, positions, base, table, index * PARTITION, end_key, scale, stride_block, stride_kv,
                stride_slot, BLOCK_SIZE, HEAD_DIM, DIM, ROWS, PARTITION, True,
            )  # fmt: skip
            if KEEP == "each":
                tl.store(partial_max + partials + index, m, mask=valid)
                tl.store(partial_sum + partials + index, l, mask=valid)
                tl.store(
                    partial_out + (partials + index)[:, None] * HEAD_DIM + columns[None, :], o, mask=inside
                )
            else:
                sees = positions >= index * PARTITION
                largest, before, after = scales(running_max, m)
                running_max = tl.where(sees, largest, running_max)
                running_sum = tl.where(sees, running_sum * before + l * after, running_sum)
                folded = accumulator * before[:, None] + o * after[:, None]
                accumulator = tl.where(sees[:, None], folded, accumulator)
        if KEEP == "all":
            result = accumulator / running_sum[:, None] + 0.0  # no -0: its sign is that of an empty sum
            target = out + places[:, None] * HEAD_DIM + columns[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=inside)
        if KEEP == "fold":
            tl.store(partial_max + partials + split, running_max, mask=valid)
            tl.store(partial_sum + partials + split, running_sum, mask=valid)
            tl.store(
                partial_out + (partials + split)[:, None] * HEAD_DIM + columns[None, :],
                accumulator,
                mask=inside,
            )


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "most_partials"])
def combine_kernel(
    out, partial_max, partial_sum, partial_out, query_starts, context_lens, num_seqs, num_splits, num_heads,
    most_partials,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTITION: tl.constexpr, PICK: tl.constexpr,
    KEEP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Folds the partials of decode rows in order. Grid (tiles, num_heads); all as in `attention_kernel`.
    AT_ONCE partials are asked for together; past the last they count as empty, which changes nothing."""
    tile, head = tl.program_id(0), tl.program_id(1)
    if PICK == "token":
        sequence = find_sequence(query_starts, num_seqs, tile, tile)
    else:
        sequence = tile
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    first_query = 0
    present = num_queries == 1
    if PICK == "token":
        first_query = tile - start
        present = first_query < num_queries
    if present:
        end_key = tl.load(context_lens + sequence) - num_queries + first_query + 1
        count = tl.cdiv(end_key, PARTITION)
        if KEEP == "fold":
            count = num_splits
        columns = tl.arange(0, DIM)
        in_head = columns < HEAD_DIM
        partials = (tile.to(tl.int64) * num_heads + head) * most_partials
        running_max = tl.full([1], float("-inf"), tl.float32)
        running_sum = tl.zeros([1], tl.float32)
        accumulator = tl.zeros([1, DIM], tl.float32)
        for first in range(0, count, AT_ONCE):
            for ahead in tl.static_range(AT_ONCE):
                index = first + ahead + tl.arange(0, 1)
                exists = index < count
                m = tl.load(partial_max + partials + index, mask=exists, other=float("-inf"))
                l = tl.load(partial_sum + partials + index, mask=exists, other=0.0)
                o = tl.load(
                    partial_out + (partials + index)[:, None] * HEAD_DIM + columns[None, :],
                    mask=exists[:, None] & in_head[None, :],
                    other=0.0,
                )
                running_max, before, after = scales(running_max, m)
                running_sum = running_sum * before + l * after
                accumulator = accumulator * before[:, None] + o * after[:, None]
        result = accumulator / running_sum[:, None] + 0.0
        row = (start + first_query).to(tl.int64) * num_heads + head
        target = out + row * HEAD_DIM + columns[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=in_head[None, :])

"""Choosing tokens without sorting a vocabulary; every sum is of whole numbers, so in any order the same.

A score's weight is e^((score - peak) / temperature), a polynomial of single operations on a grid of 2^-34
(`weigh`): as an integer it is at most 2^34. A score's key is its place among all floats, below 2^32.

What is left of a row is said by a key T and a count of ties: ids above T, and the first so many at T. T is
the largest key at which those at or above it still reach a goal (`select_kernel`: a number of ids for top-k,
a share of the weight for top-p), found four bits at a time: each pass sums what lies at or above 16 keys.

Arrays of a row's state, `num_rows` = R, a row's parts = C:
    sums [8, R, 16] int64, prefixes [9, R] int64, above [R] int64, ties [R, C] int64; all zero at first.
"""

import triton
import triton.language as tl

GRID = tl.constexpr(2.0**-34)


@triton.jit
def weigh(scores, peak, inverse_temperature):
    """e^((score - peak) · inverse) on the grid, as int64 multiples of 2^-34. -inf weighs 0."""
    x = tl.maximum((scores - peak) * inverse_temperature, -25.0)
    shifted = x * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    x = x - n * 0.693359375
    x = x + n * 2.12194440e-4
    p = x * 1.9875691500e-4 + 1.3981999507e-3
    p = p * x + 8.3334519073e-3
    p = p * x + 4.1665795894e-2
    p = p * x + 1.6666665459e-1
    p = p * x + 5.0000001201e-1
    p = p * (x * x) + x + 1.0
    bits = p.to(tl.int32, bitcast=True) + ((shifted.to(tl.int32, bitcast=True) - 0x4B400000) << 23)
    weight = bits.to(tl.float32, bitcast=True)
    to_grid = 0.00048828125  # 2^-11: what is below, plus this, is a multiple of 2^-34
    weight = tl.where(weight < to_grid, (weight + to_grid) - to_grid, weight)
    return (weight * 17179869184.0).to(tl.int64)


@triton.jit
def key_of(scores):
    """Keys rise with scores; -0 is 0."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def score_of(key):
    ordered = (key - 2147483648).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ties_kept(above, goal, at_key, BY_WEIGHT: tl.constexpr):
    """How many ids at T belong to what reaches the goal: a count, or `goal` of the weight, each at T weighing
    `at_key`; `above` is the sum over T."""
    if BY_WEIGHT:
        estimate = tl.floor((goal - above.to(tl.float64)) / at_key.to(tl.float64)).to(tl.int64) - 1
        count = tl.maximum(estimate, 1)
        for _ in tl.static_range(4):
            count = tl.where((above + count * at_key).to(tl.float64) >= goal, count, count + 1)
        return count
    else:
        return goal - above


@triton.jit
def among_kept(keys, kept, ties_row, part, num_parts, threshold, allowed, PARTS: tl.constexpr):
    """`kept` without ids below `threshold`, and without those at it past the first `allowed` of the row."""
    is_tie = keys == threshold
    parts = tl.arange(0, PARTS)
    earlier = tl.load(ties_row + parts, mask=(parts < num_parts) & (parts < part), other=0)
    rank = tl.sum(earlier, axis=0) + tl.cumsum(is_tie.to(tl.int64), axis=0)
    return kept & ((keys > threshold) | (is_tie & (rank <= allowed)))


@triton.jit
def goal_of(row, num_rows, counts, shares, sums, BY_WEIGHT: tl.constexpr):
    """A number of ids, or a share of all the weight that is left: pass 0 at key 0 has summed it. In fp64 the
    same product that a sum of weights would give, scaled by a power of two."""
    if BY_WEIGHT:
        total = tl.load(sums + row * 16).to(tl.float64)
        return tl.load(shares + row) * total
    else:
        return tl.load(counts + row)


@triton.jit
def prefix_of(row, num_rows, level, counts, shares, sums, prefixes, BY_WEIGHT: tl.constexpr):
    """Bits of T found before this level, none before level 0."""
    before = tl.maximum(level - 1, 0) * num_rows + row
    prefix = tl.load(prefixes + before)
    reached = tl.load(sums + before * 16 + tl.arange(0, 16))
    goal = goal_of(row, num_rows, counts, shares, sums, BY_WEIGHT)
    if BY_WEIGHT:
        enough = reached.to(tl.float64) >= goal
    else:
        enough = reached >= goal
    digit = tl.sum(enough.to(tl.int64), axis=0) - 1
    return tl.where(level > 0, prefix + (digit << (32 - 4 * level)), 0)


@triton.jit
def load_row(
    scores, rows, peaks, inverses, row, part, size, stride, FIRST: tl.constexpr, first_prefixes, first_above,
    first_ties, first_counts, num_rows, num_parts, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """(keys, weights, whether left) of a part of a row; with FIRST, of what an earlier selection by count
    left."""
    ids = part * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + row).to(tl.int64)
    values = tl.load(scores + source * stride + ids, mask=ids < size, other=float("-inf"))
    kept = ids < size
    keys = key_of(values)
    if FIRST:
        threshold = tl.load(first_prefixes + 8 * num_rows + row)
        allowed = tl.load(first_counts + row) - tl.load(first_above + row)
        kept = among_kept(
            keys, kept, first_ties + row * num_parts, part, num_parts, threshold, allowed, PARTS
        )
    weights = weigh(values, tl.load(peaks + row), tl.load(inverses + row))
    return keys, weights, kept


@triton.jit(do_not_specialize=["num_rows", "num_parts", "level"])
def select_kernel(
    scores, rows, peaks, inverses, counts, shares, sums, prefixes, above, ties, first_prefixes, first_above,
    first_ties, num_rows, num_parts, size, stride, level,
    LAST: tl.constexpr, BY_WEIGHT: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One pass, grid (R, C). `rows` [R] are rows of `scores`, `stride` apart. Levels 0 to 7 sum for four bits
    of T each; level 8, the LAST, knows T, sums what is above it and counts the ties of each part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, weights, kept = load_row(
        scores, rows, peaks, inverses, row, part, size, stride, FIRST, first_prefixes, first_above,
        first_ties, counts, num_rows, num_parts, BLOCK, PARTS,
    )  # fmt: skip
    measure = kept.to(tl.int64)
    if BY_WEIGHT:
        measure = tl.where(kept, weights, 0)
    prefix = prefix_of(row, num_rows, level, counts, shares, sums, prefixes, BY_WEIGHT)
    if part == 0:
        tl.store(prefixes + level * num_rows + row, prefix)
    if LAST:
        tl.atomic_add(above + row, tl.sum(tl.where(keys > prefix, measure, 0), axis=0))
        tl.store(ties + row * num_parts + part, tl.sum((kept & (keys == prefix)).to(tl.int64), axis=0))
    else:
        digits = tl.arange(0, 16)
        thresholds = prefix + (digits.to(tl.int64) << (28 - 4 * level))
        reaching = tl.where(keys[:, None] >= thresholds[None, :], measure[:, None], 0)
        tl.atomic_add(sums + (level * num_rows + row) * 16 + digits, tl.sum(reaching, axis=0))


@triton.jit
def final_weights(
    scores, rows, peaks, inverses, least, counts, shares, sums, prefixes, above, ties, first_prefixes,
    first_above, first_ties, row, part, num_rows, num_parts, size, stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Weights of a part after top-k (FIRST), top-p (SECOND) and min-p; 0: not left."""
    keys, weights, kept = load_row(
        scores, rows, peaks, inverses, row, part, size, stride, FIRST, first_prefixes, first_above,
        first_ties, counts, num_rows, num_parts, BLOCK, PARTS,
    )  # fmt: skip
    if SECOND:
        threshold = tl.load(prefixes + 8 * num_rows + row)
        at_key = weigh(score_of(threshold), tl.load(peaks + row), tl.load(inverses + row))
        goal = goal_of(row, num_rows, counts, shares, sums, True)
        allowed = ties_kept(tl.load(above + row), goal, at_key, True)
        kept = among_kept(keys, kept, ties + row * num_parts, part, num_parts, threshold, allowed, PARTS)
    kept = kept & (weights.to(tl.float64) * GRID >= tl.load(least + row).to(tl.float64))
    return tl.where(kept, weights, 0)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def sum_parts_kernel(
    scores, rows, peaks, inverses, least, counts, shares, sums, prefixes, above, ties, first_prefixes,
    first_above, first_ties, part_sums, num_rows, num_parts, size, stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """part_sums [R, C] int64: the weight left in each part. Grid (R, C)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    weights = final_weights(
        scores, rows, peaks, inverses, least, counts, shares, sums, prefixes, above, ties, first_prefixes,
        first_above, first_ties, row, part, num_rows, num_parts, size, stride, FIRST, SECOND, BLOCK, PARTS,
    )  # fmt: skip
    tl.store(part_sums + row * num_parts + part, tl.sum(weights, axis=0))


@triton.jit
def uniform(seed, position):
    """In [0, 1), 53 bits: Philox4x32-10 (Salmon et al., SC'11); key = seed, counter = position, as int64
    bits."""
    mask = 0xFFFFFFFF
    c0, c1 = position & mask, (position >> 32) & mask
    c2, c3 = position * 0, position * 0
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in tl.static_range(10):
        # products of two 32-bit numbers, the second below 2^32: high and low words from 16-bit halves
        low_0, low_2 = c0 & 0xFFFF, c2 & 0xFFFF
        high_0, high_2 = c0 >> 16, c2 >> 16
        first_0, first_2 = low_0 * 0xD2511F53, low_2 * 0xCD9E8D57
        second_0, second_2 = high_0 * 0xD2511F53 + (first_0 >> 16), high_2 * 0xCD9E8D57 + (first_2 >> 16)
        low_word_0, low_word_2 = (
            ((second_0 << 16) | (first_0 & 0xFFFF)) & mask,
            ((second_2 << 16) | (first_2 & 0xFFFF)) & mask,
        )
        c0 = (second_2 >> 16) ^ c1 ^ k0
        c2 = (second_0 >> 16) ^ c3 ^ k1
        c1 = low_word_2
        c3 = low_word_0
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    return ((c0 >> 5) * 67108864 + (c1 >> 6)).to(tl.float64) * (2.0**-53)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def draw_kernel(
    scores, rows, peaks, inverses, least, counts, shares, sums, prefixes, above, ties, first_prefixes,
    first_above, first_ties, part_sums, seeds, positions, tokens, num_rows, num_parts, size, stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """tokens [R]: the id whose share of the running sum, in id order, holds u · total. Grid (R,). Where that
    product rounds to the total, the last id with any weight."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    in_parts = tl.load(part_sums + row * num_parts + parts, mask=parts < num_parts, other=0)
    upto = tl.cumsum(in_parts, axis=0)
    total = tl.sum(in_parts, axis=0)
    threshold = uniform(tl.load(seeds + row), tl.load(positions + row)) * total.to(tl.float64)
    passed = (upto.to(tl.float64) <= threshold) & (parts < num_parts)
    part = tl.sum(passed.to(tl.int32), axis=0)
    last_part = tl.max(tl.where(in_parts > 0, parts, 0), axis=0)
    is_last = part >= num_parts
    part = tl.where(is_last, last_part, part)
    before = tl.sum(tl.where(parts < part, in_parts, 0), axis=0)
    weights = final_weights(
        scores, rows, peaks, inverses, least, counts, shares, sums, prefixes, above, ties, first_prefixes,
        first_above, first_ties, row, part, num_rows, num_parts, size, stride, FIRST, SECOND, BLOCK, PARTS,
    )  # fmt: skip
    running = before + tl.cumsum(weights, axis=0)
    index = tl.sum((running.to(tl.float64) <= threshold).to(tl.int32), axis=0)
    last = tl.max(tl.where(weights > 0, tl.arange(0, BLOCK), 0), axis=0)
    tl.store(tokens + row, (part * BLOCK + tl.where(is_last, last, index)).to(tl.int64))


@triton.jit(do_not_specialize=["num_entries"])
def penalize_kernel(
    scores, rows, ids, counts, repetitions, frequencies, presences, num_entries, stride, BLOCK: tl.constexpr
):
    """s > 0 ? s / repetition : s · repetition of each id seen; of those generated, minus frequency · count,
    minus presence. Grid (ceil(num_entries / BLOCK),). An entry is a row, an id, and how often it was
    generated."""
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entries < num_entries
    row = tl.load(rows + entries, mask=exists, other=0).to(tl.int64)
    count = tl.load(counts + entries, mask=exists, other=0)
    places = scores + row * stride + tl.load(ids + entries, mask=exists, other=0)
    score = tl.load(places, mask=exists, other=0.0)
    repetition = tl.load(repetitions + row, mask=exists, other=1.0)
    score = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
    less = score - tl.load(frequencies + row, mask=exists, other=0.0) * count.to(tl.float32)
    less = less - tl.load(presences + row, mask=exists, other=0.0)
    tl.store(places, tl.where(count > 0, less, score), mask=exists)

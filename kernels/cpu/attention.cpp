// Causal attention of a packed batch over paged keys and values.
//
// The work is cut into items (sequence, some KV heads, tile of queries) and shared out over threads. For each of
// its KV heads an item has `rows` = queries x query heads of the group, in position order. It walks the
// partitions of its sequence from position 0:
// 1. keys, a short run within a block at a time, meet every row that sees the partition: scores. Where rows are many,
//    the partition's keys are first laid out so that a vector holds several keys;
// 2. each row's scores past its own position become -inf; max, exp and sum over the whole partition;
// 3. values, likewise: the partition's weighted sum;
// 4. the row's running (max, sum, accumulator) is rescaled and takes the partition in. A row that does not see
//    a partition skips it.
// A decode item takes all KV heads, so that a block is read from memory as one stretch; a prefill item takes one,
// and widens its keys and values to fp32 once for all rows.
//
// Orders that make the bits: a score is one chain over head_dim per lane and a fixed tree over lanes; a
// partition's sum is one chain per lane over the partition and the same tree; its weighted sum is one chain in
// key order per element. None depends on the item, so a decode step and a prefill chunk agree.
#include "attention.h"

#include "attention_tiles.h"
#include "simd.h"
#include "threads.h"

namespace baton {
namespace {

constexpr int64_t kRun = 32;           // keys or values widened at a time: they stay in L1
constexpr int64_t kDirectRun = 8;      // keys or values taken at a time where they are read in place
constexpr int64_t kAhead = 16;         // keys or values asked for ahead of use
constexpr int64_t kTileRows = 96;      // about as many rows of one KV head share what is widened
constexpr int64_t kDecodeQueries = 4;  // up to as many queries of a sequence are taken for all KV heads at once

// One sequence's keys (`which` 0) and values (1), found through its block table.
template <typename Kv>
struct Pages {
    const char* pool;
    const int32_t* block_table;
    const Shape& shape;

    // Positions from `position` to the end of its block or `end`, `most` at most.
    int64_t run_length(int64_t position, int64_t end, int64_t most) const {
        return std::min({most, shape.kv.block_size - position % shape.kv.block_size, end - position});
    }
    Run<Kv> run(int64_t position, int64_t which, int64_t head) const {
        const KvShape& kv = shape.kv;
        const int64_t slot = block_table[position / kv.block_size] * kv.block_size + position % kv.block_size;
        return {reinterpret_cast<const Kv*>(pool + kv.offset(slot, shape.layer, which) + head * kv.row_bytes),
                kv.token_bytes() / int64_t(sizeof(Kv))};
    }
    // Blocks lie anywhere, where no hardware prefetcher looks: rows are asked for by name, a few at a time, for
    // a request that finds too many others waiting is lost.
    void prefetch(int64_t position, int64_t count, int64_t which, int64_t head) const {
        Run<Kv> next = run(position, which, head);
        const int64_t row_bytes = shape.kv.row_bytes;
        for (int64_t j = run_length(position, position + count, count); j > 0; --j, next.rows += next.stride)
            for (int64_t byte = 0; byte < row_bytes; byte += 64)
                baton::prefetch(reinterpret_cast<const char*>(next.rows) + byte);
    }
};

template <typename Kv>
Run<float> widen(Run<Kv> run, int64_t count, const Shape& shape, float* wide) {
    const int64_t dim = shape.kv.head_dim;
    for (int64_t j = 0; j < count; ++j) {
        const Kv* row = run.rows + j * run.stride;
        float scale = 1.0f;
        if constexpr (sizeof(Kv) == 1) std::memcpy(&scale, row + dim, sizeof scale);
        for (int64_t d = 0; d < shape.padded_dim; d += kWidth)
            store(wide + j * shape.padded_dim + d, load_partial(row + d, dim - d) * scale);
    }
    return {wide, shape.padded_dim};
}

// One KV head's share of an item: its rows and what they have accumulated so far.
struct HeadState {
    float *keys;                       // of a partition, in groups; unused where keys are read in place
    float *q, *accumulator, *partial;  // [rows, padded_dim]
    float *scores;                     // [rows, kPartition]
    float *running_max, *running_sum;  // [rows]

    static int64_t num_floats(int64_t num_rows, int64_t dim, bool direct) {
        return (direct ? 0 : kPartition * dim) + num_rows * (3 * dim + kPartition + 2);
    }

    HeadState(float* memory, int64_t num_rows, int64_t dim, bool direct)
        : keys(memory), q(memory + (direct ? 0 : kPartition * dim)), accumulator(q + num_rows * dim), partial(accumulator + num_rows * dim),
          scores(partial + num_rows * dim), running_max(scores + num_rows * kPartition),
          running_sum(running_max + num_rows) {
        std::fill(keys, q, 0.0f);
        std::fill(accumulator, accumulator + num_rows * dim, 0.0f);
        std::fill(running_max, running_max + num_rows, -kInfinity);
        std::fill(running_sum, running_sum + num_rows, 0.0f);
    }
};

template <typename T, typename Kv>
class Attention {
public:
    Attention(const Item& item, const Shape& shape, const Pages<Kv>& pages, int64_t first_position)
        : item_(item), shape_(shape), pages_(pages), dim_(shape.padded_dim), rows_(item.num_queries * shape.group),
          first_position_(first_position), end_(first_position + item.num_queries),
          direct_(rows_ <= 4 && shape.kv.head_dim == shape.padded_dim && sizeof(Kv) > 1) {
        static thread_local Scratch scratch;
        const int64_t head_floats = ceil_div(HeadState::num_floats(rows_, dim_, direct_), 16) * 16;
        wide_ = scratch.floats(kRun * dim_ + item.num_heads * head_floats);
        heads_.reserve(size_t(item.num_heads));
        for (int64_t head = 0; head < item.num_heads; ++head)
            heads_.emplace_back(wide_ + kRun * dim_ + head * head_floats, rows_, dim_, direct_);
    }

    // `out` [num_tokens, num_heads, head_dim], rounded to T; of type T, or fp32 for a product that reads it next.
    template <typename Out>
    void run(const T* q, int64_t q_row_stride, Out* out) {
        each_row([&](HeadState& head, int64_t r, int64_t query, int64_t query_head) {
            const T* source = q + query * q_row_stride + query_head * shape_.kv.head_dim;
            for (int64_t d = 0; d < dim_; d += kWidth)
                store(head.q + r * dim_ + d, load_partial(source + d, shape_.kv.head_dim - d));
        });
        for (int64_t start = 0; start < end_; start += kPartition) take_in(start, std::min(end_, start + kPartition));
        each_row([&](HeadState& head, int64_t r, int64_t query, int64_t query_head) {
            Out* target = out + (query * shape_.num_heads + query_head) * shape_.kv.head_dim;
            for (int64_t d = 0; d < shape_.kv.head_dim; d += kWidth)
                store_partial(target + d,
                              round_to<T>(load(head.accumulator + r * dim_ + d) / head.running_sum[r]),
                              shape_.kv.head_dim - d);
        });
    }

private:
    template <typename Body>
    void each_row(const Body& body) {
        for (int64_t head = 0; head < item_.num_heads; ++head)
            for (int64_t r = 0; r < rows_; ++r)
                body(heads_[size_t(head)], r, item_.first_query + r / shape_.group,
                     (item_.first_head + head) * shape_.group + r % shape_.group);
    }

    // body(head, first position, run, count) over the rows of K or V at [start, end). What is read kAhead rows later
    // (keys of a partition, its values, the next keys) is asked for meanwhile.
    template <typename Body>
    void each_run(int64_t start, int64_t end, int64_t which, const Body& body) {
        for (int64_t position = start; position < end;) {
            const int64_t count = pages_.run_length(position, end, direct_ ? kDirectRun : kRun);
            int64_t later = position + kAhead, later_which = which, later_end = end;
            if (later >= end) {
                later_which = 1 - which;
                later = which == 0 ? start + later - end : later;
                later_end = which == 0 ? end : end_;
            }
            for (int64_t h = 0; h < item_.num_heads; ++h) {
                const int64_t kv_head = item_.first_head + h;
                if (later < later_end)
                    pages_.prefetch(later, std::min(count, later_end - later), later_which, kv_head);
                const Run<Kv> rows = pages_.run(position, which, kv_head);
                if constexpr (sizeof(Kv) > 1)
                    if (direct_) {
                        body(heads_[size_t(h)], position - start, rows, count);
                        continue;
                    }
                body(heads_[size_t(h)], position - start, widen(rows, count, shape_, wide_), count);
            }
            position += count;
        }
    }

    // The partition at [start, end) into every row that sees it.
    void take_in(int64_t start, int64_t end) {
        const int64_t from = std::max<int64_t>(0, start - first_position_) * shape_.group;  // rows before do not
        each_run(start, end, 0, [&](HeadState& head, int64_t j, auto keys, int64_t count) {
            if (!direct_) return scatter_keys(wide_, dim_, j, count, head.keys);
            by_rows(rows_ - from, [&](int64_t r, auto rows) {
                score_keys<rows.value>(head.q + (from + r) * dim_, dim_, keys, count, shape_.scale,
                                       head.scores + (from + r) * kPartition + j);
            });
        });
        if (!direct_)
            for (HeadState& head : heads_)
                by_many_rows(rows_ - from, [&](int64_t r, auto rows) {
                    score_groups<rows.value>(head.q + (from + r) * dim_, dim_, head.keys, end - start, shape_.scale,
                                             head.scores + (from + r) * kPartition);
                });
        for (HeadState& head : heads_) {
            for (int64_t r = from; r < rows_; ++r) {
                const int64_t visible = std::min(kPartition, first_position_ + r / shape_.group + 1 - start);
                const float rescale =
                    softmax_row(head.scores + r * kPartition, visible, head.running_max[r], head.running_sum[r]);
                for (int64_t d = r * dim_; d < (r + 1) * dim_; d += kWidth)
                    store(head.accumulator + d, load(head.accumulator + d) * rescale);
            }
            std::fill(head.partial + from * dim_, head.partial + rows_ * dim_, 0.0f);
        }
        each_run(start, end, 1, [&](HeadState& head, int64_t j, auto values, int64_t count) {
            by_rows(rows_ - from, [&](int64_t r, auto rows) {
                add_values<rows.value>(head.scores + (from + r) * kPartition + j, values, count, dim_,
                                       head.partial + (from + r) * dim_);
            });
        });
        for (HeadState& head : heads_)
            for (int64_t i = from * dim_; i < rows_ * dim_; i += kWidth)
                store(head.accumulator + i, load(head.accumulator + i) + load(head.partial + i));
    }

    const Item& item_;
    const Shape& shape_;
    const Pages<Kv> pages_;
    const int64_t dim_, rows_, first_position_, end_;
    const bool direct_;  // few rows: keys and values are widened in registers, not kept
    float* wide_;        // [kRun, padded_dim]
    std::vector<HeadState> heads_;
};

}  // namespace

std::vector<Item> cut(const Shape& shape, const int32_t* query_starts, int64_t num_seqs, int64_t num_threads) {
    const int64_t tile_queries = std::max<int64_t>(1, kTileRows / shape.group);
    std::vector<Item> items;
    for (int64_t s = 0; s < num_seqs; ++s) {
        const int64_t begin = query_starts[s], end = query_starts[s + 1];
        const bool all_heads = end - begin <= kDecodeQueries && num_seqs >= 2 * num_threads - 1;
        const int64_t heads = all_heads ? shape.kv.num_kv_heads : 1;
        for (int64_t first = begin; first < end; first += tile_queries)
            for (int64_t head = 0; head < shape.kv.num_kv_heads; head += heads)
                items.push_back({s, head, heads, first, std::min(tile_queries, end - first)});
    }
    return items;
}

template <typename T, typename Out>
void attend(const Item& item, const Shape& shape, const T* q, int64_t q_row_stride, const char* pool,
            const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables, int64_t max_blocks,
            Out* out) {
    const int64_t first_position = context_lens[item.sequence] - query_starts[item.sequence + 1] + item.first_query;
    const int32_t* block_table = block_tables + item.sequence * max_blocks;
    if (shape.kv.is_int8)
        Attention<T, int8_t>(item, shape, {pool, block_table, shape}, first_position).run(q, q_row_stride, out);
    else
        Attention<T, T>(item, shape, {pool, block_table, shape}, first_position).run(q, q_row_stride, out);
}

template void attend(const Item&, const Shape&, const float*, int64_t, const char*, const int32_t*, const int32_t*,
                     const int32_t*, int64_t, float*);
template void attend(const Item&, const Shape&, const bf16*, int64_t, const char*, const int32_t*, const int32_t*,
                     const int32_t*, int64_t, bf16*);
template void attend(const Item&, const Shape&, const bf16*, int64_t, const char*, const int32_t*, const int32_t*,
                     const int32_t*, int64_t, float*);

// The first sequence whose lengths or blocks do not fit the pool, or -1.
int64_t first_unfit(const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables,
                           int64_t max_blocks, int64_t num_seqs, int64_t num_tokens, int64_t num_blocks,
                           int64_t block_size) {
    for (int64_t s = 0; s < num_seqs; ++s) {
        const int64_t num_queries = query_starts[s + 1] - query_starts[s];
        const int64_t blocks = ceil_div(context_lens[s], block_size);
        if (query_starts[s] < 0 || query_starts[s + 1] > num_tokens) return s;
        if (num_queries < 0 || num_queries > context_lens[s] || blocks > max_blocks) return s;
        for (int64_t b = 0; b < blocks; ++b) {
            const int32_t block = block_tables[s * max_blocks + b];
            if (block < 0 || block >= num_blocks) return s;
        }
    }
    return -1;
}

namespace {

template <typename T>
void paged_attention(const T* q, int64_t q_row_stride, const char* pool, const Shape& shape, const int32_t* query_starts,
                     const int32_t* context_lens, const int32_t* block_tables, int64_t max_blocks, int64_t num_seqs,
                     T* out, int64_t num_threads) {
    const std::vector<Item> items = cut(shape, query_starts, num_seqs, num_threads);
    parallel_items(num_threads, int64_t(items.size()), [&](int64_t i) {
        attend(items[size_t(i)], shape, q, q_row_stride, pool, query_starts, context_lens, block_tables, max_blocks,
               out);
    });
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

int64_t baton_partition_size() { return kPartition; }

// Row stride in elements. Returns -1, or the index of a sequence whose lengths or blocks do not fit the pool;
// nothing is written then.
int64_t baton_paged_attention(const void* q, int64_t q_row_stride, const void* pool, int64_t num_blocks,
                              int64_t num_layers, int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
                              int64_t layer, const int32_t* query_starts, const int32_t* context_lens,
                              const int32_t* block_tables, int64_t max_blocks, int64_t num_seqs, int64_t num_tokens,
                              int64_t num_heads, float scale, void* out, int64_t is_bf16, int64_t is_int8,
                              int64_t num_threads) {
    const int64_t bad = first_unfit(query_starts, context_lens, block_tables, max_blocks, num_seqs, num_tokens,
                                    num_blocks, block_size);
    if (bad >= 0) return bad;
    const Shape shape(KvShape(num_layers, block_size, num_kv_heads, head_dim, is_int8, is_bf16), num_heads, scale, layer);
    if (is_bf16)
        paged_attention(static_cast<const bf16*>(q), q_row_stride, static_cast<const char*>(pool), shape,
                        query_starts, context_lens, block_tables, max_blocks, num_seqs, static_cast<bf16*>(out),
                        num_threads);
    else
        paged_attention(static_cast<const float*>(q), q_row_stride, static_cast<const char*>(pool), shape,
                        query_starts, context_lens, block_tables, max_blocks, num_seqs, static_cast<float*>(out),
                        num_threads);
    return -1;
}
}

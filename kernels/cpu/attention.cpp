// Causal attention of a packed batch over paged keys and values.
//
// The work is cut into (sequence, KV head, tile of queries) and shared out over threads. One such item has
// `rows` = queries x query heads of the group, in position order, and walks the partitions of its sequence
// from position 0:
// 1. keys are widened to fp32 a few at a time and met by every row: scores;
// 2. each row's scores past its own position become -inf; max, exp and sum over the whole partition;
// 3. values, likewise: the partition's weighted sum;
// 4. the row's running (max, sum, accumulator) is rescaled and takes the partition in. A row that does not see
//    a partition skips it.
//
// Orders that make the bits: a score is one chain over head_dim per lane and a fixed tree over lanes; a
// partition's sum is one chain per lane over the partition and the same tree; its weighted sum is one chain in
// key order per element. None depends on the tile, so a decode step and a prefill chunk agree.
#include <cmath>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace baton {
namespace {

constexpr int64_t kPartition = 128;  // kernels.ops.PARTITION_SIZE
constexpr int64_t kKeys = 32;        // keys or values widened at a time: they stay in L1
constexpr int64_t kTileRows = 48;    // about this many rows share the widened keys

struct Shape {
    int64_t num_heads, num_kv_heads, head_dim, padded_dim, group;
    int64_t num_layers, block_size, layer;
    float scale;
};

struct Item {
    int64_t sequence, kv_head, first_query, num_queries;
};

// One partition's rows of K (`which` 0) or V (1) for one KV head, found through the block table.
template <typename T>
struct Pages {
    const T* pool;
    const int32_t* block_table;
    const Shape& shape;
    int64_t kv_head;

    const T* row(int64_t position, int64_t which) const {
        int64_t block = block_table[position / shape.block_size], offset = position % shape.block_size;
        int64_t half = (block * shape.num_layers + shape.layer) * 2 + which;
        return pool + ((half * shape.block_size + offset) * shape.num_kv_heads + kv_head) * shape.head_dim;
    }

    void widen(int64_t position, int64_t count, int64_t which, float* wide) const {
        for (int64_t j = 0; j < count; ++j, wide += shape.padded_dim) {
            const T* source = row(position + j, which);
            for (int64_t d = 0; d < shape.head_dim; d += kWidth)
                store(wide + d, load_partial(source + d, shape.head_dim - d));
        }
    }
};

// scores[r][j] = scale * q[r] . k[j] for Rows rows and Keys keys.
template <int Rows, int Keys>
void score_tile(const float* q, const float* k, int64_t dim, float scale, float* scores) {
    Vec sums[Rows][Keys] = {};
    for (int64_t d = 0; d < dim; d += kWidth)
        for (int j = 0; j < Keys; ++j) {
            Vec key = load(k + j * dim + d);
            for (int r = 0; r < Rows; ++r) sums[r][j] = fma(load(q + r * dim + d), key, sums[r][j]);
        }
    for (int r = 0; r < Rows; ++r)
        for (int j = 0; j < Keys; ++j) scores[r * kPartition + j] = sum_lanes(sums[r][j]) * scale;
}

template <int Keys>
void score_rows(const float* q, int64_t num_rows, const float* k, int64_t dim, float scale, float* scores) {
    int64_t r = 0;
    for (; r + 3 <= num_rows; r += 3) score_tile<3, Keys>(q + r * dim, k, dim, scale, scores + r * kPartition);
    for (; r < num_rows; ++r) score_tile<1, Keys>(q + r * dim, k, dim, scale, scores + r * kPartition);
}

// out[r] += sum_j weights[r][j] * v[j], a chain in key order per element, over Vecs vectors of head_dim.
template <int Rows, int Vecs>
void value_tile(const float* weights, const float* v, int64_t count, int64_t dim, float* out) {
    Vec sums[Rows][Vecs];
    for (int r = 0; r < Rows; ++r)
        for (int i = 0; i < Vecs; ++i) sums[r][i] = load(out + r * dim + i * kWidth);
    for (int64_t j = 0; j < count; ++j)
        for (int i = 0; i < Vecs; ++i) {
            Vec value = load(v + j * dim + i * kWidth);
            for (int r = 0; r < Rows; ++r)
                sums[r][i] = fma(splat(weights[r * kPartition + j]), value, sums[r][i]);
        }
    for (int r = 0; r < Rows; ++r)
        for (int i = 0; i < Vecs; ++i) store(out + r * dim + i * kWidth, sums[r][i]);
}

template <int Vecs>
void value_rows(const float* weights, int64_t num_rows, const float* v, int64_t count, int64_t dim, float* out) {
    int64_t r = 0;
    for (; r + 3 <= num_rows; r += 3)
        value_tile<3, Vecs>(weights + r * kPartition, v, count, dim, out + r * dim);
    for (; r < num_rows; ++r) value_tile<1, Vecs>(weights + r * kPartition, v, count, dim, out + r * dim);
}

// Scores [kPartition] of one row to weights exp(score - max), in place; rescales and extends the running pair.
// Returns the factor for what was accumulated before.
float softmax_row(float* scores, int64_t visible, float& running_max, float& running_sum) {
    for (int64_t j = visible; j < kPartition; ++j) scores[j] = -kInfinity;
    Vec highest = load(scores);
    for (int64_t j = kWidth; j < kPartition; j += kWidth) highest = max(highest, load(scores + j));
    float new_max = std::max(running_max, max_lanes(highest));
    Vec total = {};
    for (int64_t j = 0; j < kPartition; j += kWidth) {
        Vec weight = exp(load(scores + j) - new_max);
        store(scores + j, weight);
        total += weight;
    }
    float rescale = exp(splat(running_max - new_max))[0];
    running_max = new_max;
    running_sum = running_sum * rescale + sum_lanes(total);
    return rescale;
}

template <typename T>
void attend(const Item& item, const Shape& shape, const T* q, int64_t q_row_stride, const Pages<T>& pages,
            int64_t first_position, T* out) {
    static thread_local Scratch scratch;
    const int64_t dim = shape.padded_dim, group = shape.group, num_rows = item.num_queries * group;
    float* rows = scratch.floats(num_rows * (3 * dim + kPartition + 2) + kKeys * dim);
    float* wide = rows + num_rows * dim;
    float* partial = wide + kKeys * dim;
    float* accumulator = partial + num_rows * dim;
    float* scores = accumulator + num_rows * dim;
    float* running_max = scores + num_rows * kPartition;
    float* running_sum = running_max + num_rows;

    for (int64_t r = 0; r < num_rows; ++r) {
        const T* source = q + (item.first_query + r / group) * q_row_stride +
                          (item.kv_head * group + r % group) * shape.head_dim;
        for (int64_t d = 0; d < dim; d += kWidth)
            store(rows + r * dim + d, load_partial(source + d, shape.head_dim - d));
    }
    std::fill(accumulator, accumulator + num_rows * dim, 0.0f);
    std::fill(running_max, running_max + num_rows, -kInfinity);
    std::fill(running_sum, running_sum + num_rows, 0.0f);

    const int64_t end_position = first_position + item.num_queries;
    for (int64_t start = 0; start < end_position; start += kPartition) {
        const int64_t num_keys = std::min(kPartition, end_position - start);
        const int64_t from = std::max<int64_t>(0, start - first_position) * group;  // rows before do not see it
        const int64_t count = num_rows - from;
        float* part_scores = scores + from * kPartition;
        for (int64_t j = 0; j < num_keys; j += kKeys) {
            int64_t keys = std::min(kKeys, num_keys - j), k = 0;
            pages.widen(start + j, keys, 0, wide);
            for (; k + 4 <= keys; k += 4)
                score_rows<4>(rows + from * dim, count, wide + k * dim, dim, shape.scale, part_scores + j + k);
            for (; k < keys; ++k)
                score_rows<1>(rows + from * dim, count, wide + k * dim, dim, shape.scale, part_scores + j + k);
        }
        for (int64_t r = from; r < num_rows; ++r) {
            int64_t visible = std::min(kPartition, first_position + r / group + 1 - start);
            float rescale = softmax_row(scores + r * kPartition, visible, running_max[r], running_sum[r]);
            for (int64_t d = 0; d < dim; d += kWidth)
                store(accumulator + r * dim + d, load(accumulator + r * dim + d) * rescale);
        }
        std::fill(partial + from * dim, partial + num_rows * dim, 0.0f);
        for (int64_t j = 0; j < num_keys; j += kKeys) {
            int64_t keys = std::min(kKeys, num_keys - j), d = 0;
            pages.widen(start + j, keys, 1, wide);
            for (; d + 4 * kWidth <= dim; d += 4 * kWidth)
                value_rows<4>(part_scores + j, count, wide + d, keys, dim, partial + from * dim + d);
            for (; d < dim; d += kWidth)
                value_rows<1>(part_scores + j, count, wide + d, keys, dim, partial + from * dim + d);
        }
        for (int64_t i = from * dim; i < num_rows * dim; i += kWidth)
            store(accumulator + i, load(accumulator + i) + load(partial + i));
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        T* target = out + ((item.first_query + r / group) * shape.num_heads + item.kv_head * group + r % group) *
                              shape.head_dim;
        for (int64_t d = 0; d < shape.head_dim; d += kWidth)
            store_partial(target + d, load(accumulator + r * dim + d) / running_sum[r], shape.head_dim - d);
    }
}

template <typename T>
void paged_attention(const T* q, int64_t q_row_stride, const T* pool, const Shape& shape, const int32_t* query_starts,
                     const int32_t* context_lens, const int32_t* block_tables, int64_t max_blocks, int64_t num_seqs,
                     T* out, int64_t num_threads) {
    const int64_t tile_queries = std::max<int64_t>(1, kTileRows / shape.group);
    std::vector<Item> items;
    for (int64_t s = 0; s < num_seqs; ++s)
        for (int64_t first = query_starts[s]; first < query_starts[s + 1]; first += tile_queries)
            for (int64_t head = 0; head < shape.num_kv_heads; ++head)
                items.push_back({s, head, first, std::min(tile_queries, query_starts[s + 1] - first)});
    parallel_items(num_threads, int64_t(items.size()), [&](int64_t i) {
        const Item& item = items[size_t(i)];
        Pages<T> pages{pool, block_tables + item.sequence * max_blocks, shape, item.kv_head};
        int64_t first_position = context_lens[item.sequence] - query_starts[item.sequence + 1] + item.first_query;
        attend(item, shape, q, q_row_stride, pages, first_position, out);
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
                              int64_t num_heads, float scale, void* out, int64_t is_bf16, int64_t num_threads) {
    for (int64_t s = 0; s < num_seqs; ++s) {
        int64_t num_queries = query_starts[s + 1] - query_starts[s];
        int64_t blocks = ceil_div(context_lens[s], block_size);
        if (query_starts[s] < 0 || query_starts[s + 1] > num_tokens) return s;
        if (num_queries < 0 || num_queries > context_lens[s] || blocks > max_blocks) return s;
        for (int64_t b = 0; b < blocks; ++b) {
            int32_t block = block_tables[s * max_blocks + b];
            if (block < 0 || block >= num_blocks) return s;
        }
    }
    Shape shape{num_heads,  num_kv_heads, head_dim, ceil_div(head_dim, kWidth) * kWidth, num_heads / num_kv_heads,
                num_layers, block_size,   layer,    scale};
    if (is_bf16)
        paged_attention(static_cast<const bf16*>(q), q_row_stride, static_cast<const bf16*>(pool), shape,
                        query_starts, context_lens, block_tables, max_blocks, num_seqs, static_cast<bf16*>(out),
                        num_threads);
    else
        paged_attention(static_cast<const float*>(q), q_row_stride, static_cast<const float*>(pool), shape,
                        query_starts, context_lens, block_tables, max_blocks, num_seqs, static_cast<float*>(out),
                        num_threads);
    return -1;
}
}

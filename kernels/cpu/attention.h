// Causal attention of a packed batch over paged keys and values, as items that threads share out; how an item is
// computed, and in what order its sums are taken, is told in `attention_item.h` and `attention_amx.h`.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_rows.h"

namespace baton {

constexpr int64_t kPartition = 128;  // kernels.ops.PARTITION_SIZE

struct Shape {
    KvShape kv;
    int64_t num_heads, group, layer;
    float scale;
    bool by_tiles = false;  // attention of bf16 models by the matrix unit, where it is lent

    Shape(const KvShape& kv, int64_t num_heads, float scale, int64_t layer = 0)
        : kv(kv), num_heads(num_heads), group(num_heads / kv.num_kv_heads), layer(layer), scale(scale) {}
};

// Some KV heads of one sequence and a tile of its queries.
struct Item {
    int64_t sequence, first_head, num_heads;  // KV heads
    int64_t first_query, num_queries;
};

// body(state of the head, row of it, query, query head) for all rows of an item, whose heads have states of their own.
template <typename State, typename Body>
void each_row(const Item& item, const Shape& shape, std::vector<State>& heads, const Body& body) {
    for (int64_t head = 0; head < item.num_heads; ++head)
        for (int64_t r = 0; r < item.num_queries * shape.group; ++r)
            body(heads[size_t(head)], r, item.first_query + r / shape.group,
                 (item.first_head + head) * shape.group + r % shape.group);
}

std::vector<Item> cut(const Shape& shape, const int32_t* query_starts, int64_t num_seqs, int64_t num_threads);

// One item. q rows are q_row_stride elements apart; `out` [num_tokens, num_heads, head_dim] is rounded to T and stored
// as T, or as fp32 for a product that reads it next. Instantiated for T and Out of the model's type and Out fp32. `then` is
// the item this thread is likely to attend next, whose first rows are asked for in time, or null.
template <typename T, typename Out>
void attend(const Item& item, const Shape& shape, const T* q, int64_t q_row_stride, const char* pool,
            const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables, int64_t max_blocks,
            Out* out, const Item* then);

// The first sequence whose lengths or blocks do not fit the pool, or -1.
int64_t first_unfit(const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables,
                    int64_t max_blocks, int64_t num_seqs, int64_t num_tokens, int64_t num_blocks, int64_t block_size);

}  // namespace baton

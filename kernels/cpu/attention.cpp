// Causal attention of a packed batch over paged keys and values: cut into items (sequence, some KV heads, tile of queries),
// which threads share out. How an item is computed, and in what order its sums are taken, is told in `attention_item.h` and
// `attention_amx.h`.
//
// A decode item takes all KV heads, so that a block is read from memory as one stretch, and each KV head once for its
// whole group of query heads; a prefill item takes one, and many rows share what is packed.
#include "attention_amx.h"
#include "attention_item.h"

namespace baton {
namespace {

constexpr int64_t kTileRows = 192;     // about as many rows of one KV head share what is packed
constexpr int64_t kDecodeQueries = 4;  // up to as many queries of a sequence are taken for all KV heads at once

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
            Out* out, const Item* then) {
    const auto first_position = [&](const Item& of) {
        return context_lens[of.sequence] - query_starts[of.sequence + 1] + of.first_query;
    };
    const auto table = [&](const Item& of) { return block_tables + of.sequence * max_blocks; };
    const Pages pages{pool, table(item), shape};
    Reading next{};
    if (then != nullptr) next = reading_of(*then, shape, table(*then), first_position(*then) + then->num_queries);
    const Reading* const comes = then == nullptr ? nullptr : &next;
    if constexpr (kHasAmx && std::is_same_v<T, bf16>)
        if (shape.by_tiles && amx_is_lent()) {
            if (!shape.kv.is_int8 && shape.scale > 0)
                return TileAttention(item, shape, pages, first_position(item), comes).run(q, q_row_stride, out);
            if constexpr (kHasDot)
                if (shape.kv.is_int8 && item.num_queries * shape.group > kTileLines) {
                    const AmxSession session{AmxSession::Tiles()};
                    return Attention<T, int8_t, true>(item, shape, pages, first_position(item), comes).run(q, q_row_stride, out);
                }
        }
    if (shape.kv.is_int8)
        Attention<T, int8_t>(item, shape, pages, first_position(item), comes).run(q, q_row_stride, out);
    else
        Attention<T, T>(item, shape, pages, first_position(item), comes).run(q, q_row_stride, out);
}

template void attend(const Item&, const Shape&, const float*, int64_t, const char*, const int32_t*, const int32_t*,
                     const int32_t*, int64_t, float*, const Item*);
template void attend(const Item&, const Shape&, const bf16*, int64_t, const char*, const int32_t*, const int32_t*,
                     const int32_t*, int64_t, bf16*, const Item*);
template void attend(const Item&, const Shape&, const bf16*, int64_t, const char*, const int32_t*, const int32_t*,
                     const int32_t*, int64_t, float*, const Item*);

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
               out, nullptr);
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
                              int64_t by_tiles, int64_t num_threads) {
    const int64_t bad = first_unfit(query_starts, context_lens, block_tables, max_blocks, num_seqs, num_tokens,
                                    num_blocks, block_size);
    if (bad >= 0) return bad;
    const KvShape kv(num_layers, block_size, num_kv_heads, head_dim, is_int8, is_bf16);
    Shape shape(kv, num_heads, scale, layer);
    shape.by_tiles = by_tiles != 0;
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

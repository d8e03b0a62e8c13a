// Causal attention of a packed batch over paged keys and values.
//
// The work is cut into items (sequence, some KV heads, tile of queries) and shared out over threads. For each of
// its KV heads an item has `rows` = queries x query heads of the group, in position order. It walks the
// partitions of its sequence from position 0:
// 1. keys, a chunk at a time, meet every row that sees them: scores. A few rows read them in place, for many they are
//    packed to an fp32 panel first. What is asked of memory meanwhile is told at `Ahead`;
// 2. each row's scores past its own position become -inf; max, exp and sum over the whole partition;
// 3. values, likewise: the partition's weighted sum;
// 4. the row's running (max, sum, accumulator) is rescaled and takes the partition in. A row that does not see
//    a partition skips it.
// A decode item takes all KV heads, so that a block is read from memory as one stretch, and each KV head once for its
// whole group of query heads; a prefill item takes one, and many rows share what is packed.
//
// Where the model is bf16 and the machine has dot products, keys and values of bf16 meet queries and weights of bf16 by
// pairs (`attention_pairs.h`), and those of int8 meet integers (`attention_bytes.h`).
//
// Orders that make the bits: a score is one chain over head_dim, times the key's factor (the softmax scale, and in int8
// the key's own); a partition's sum is one chain per lane over the partition and a fixed tree over lanes; its weighted
// sum is one chain in key order per element. With pairs, chains are over pairs, a score's are four, and weights
// meet values rounded to bf16; sums of integers are exact. None depends on the item, so a decode step and a prefill chunk agree (where
// values are finite: a later key of a tile has weight 0, but is multiplied).
#include "attention.h"

#include "attention_bytes.h"
#include "attention_pages.h"
#include "attention_pairs.h"
#include "attention_tiles.h"
#include "attention_weights.h"
#include "simd.h"
#include "threads.h"

namespace baton {
namespace {

constexpr int64_t kTileRows = 192;        // about as many rows of one KV head share what is packed
constexpr int64_t kFewKeys = 2 * kGroup;  // a chunk where rows are few; else a whole partition
constexpr int64_t kDecodeQueries = 4;     // up to as many queries of a sequence are taken for all KV heads at once

Reading reading_of(const Item& item, const Shape& shape, const int32_t* block_table, int64_t end) {
    return {block_table, item.first_head * shape.kv.row_bytes, item.num_heads * shape.kv.row_bytes, end};
}

// One KV head's share of an item: its rows and what they have accumulated so far.
struct HeadState {
    float *q, *accumulator, *partial;  // [rows, dim]; with pairs q is bf16, of integers an `IntegerQuery` and partial int32
    float *scores;                     // [rows, kPartition]; then weights, bf16 ones or `IntegerWeights` in the same memory
    float *running_max, *running_sum;  // [rows]

    static int64_t num_floats(int64_t num_rows, int64_t dim) {
        return ceil_div(num_rows * (3 * dim + kPartition + 2), 16) * 16;
    }

    HeadState(float* memory, int64_t num_rows, int64_t dim)
        : q(memory), accumulator(q + num_rows * dim), partial(accumulator + num_rows * dim),
          scores(partial + num_rows * dim), running_max(scores + num_rows * kPartition),
          running_sum(running_max + num_rows) {
        std::fill(accumulator, accumulator + num_rows * dim, 0.0f);
        std::fill(running_max, running_max + num_rows, -kInfinity);
        std::fill(running_sum, running_sum + num_rows, 0.0f);
    }
};

template <typename T, typename Kv>
class Attention {
    static constexpr bool kInt8 = sizeof(Kv) == 1;
    static constexpr bool kPairs = kHasDot && std::is_same_v<T, bf16> && !kInt8;
    static constexpr bool kIntegers = kHasDot && std::is_same_v<T, bf16> && kInt8;
    static constexpr int kMostInPlace = kIntegers ? kMostByteRows : kMostRows;
    static constexpr int64_t kUnit = kIntegers ? kQuadGroup : kGroup;  // elements that are taken at once

public:
    Attention(const Item& item, const Shape& shape, const Pages& pages, int64_t first_position, const Reading* then)
        : item_(item), shape_(shape), pages_(pages), head_dim_(shape.kv.head_dim),
          dim_(ceil_div(head_dim_, kUnit) * kUnit), rows_(item.num_queries * shape.group), first_position_(first_position),
          end_(first_position + item.num_queries), chunk_(rows_ < 4 * kMostRows ? kFewKeys : kPartition),
          in_place_(rows_ <= kMostRows && head_dim_ % kUnit == 0),
          ahead_(pages_, reading_of(item, shape, pages.block_table, end_), then) {
        static thread_local Scratch scratch;
        const int64_t head_floats = HeadState::num_floats(rows_, dim_);
        const int64_t row_floats = ceil_div(dim_ * 4 + kScaleBytes, 64) * 16;
        float* memory = scratch.floats(chunk_ * dim_ + (2 * kWidth + 1) * row_floats + item.num_heads * head_floats);
        panel_ = memory, memory += chunk_ * dim_;
        zeros_ = reinterpret_cast<const char*>(memory);
        std::fill(memory, memory + row_floats, 0.0f), memory += row_floats;
        std::fill(factors_, factors_ + kPartition, shape.scale);
        staged_ = reinterpret_cast<char*>(memory), memory += kWidth * row_floats;
        wide_rows_ = reinterpret_cast<char*>(memory), memory += kWidth * row_floats;
        row_bytes_ = row_floats * 4;
        heads_.reserve(size_t(item.num_heads));
        for (int64_t head = 0; head < item.num_heads; ++head)
            heads_.emplace_back(memory + head * head_floats, rows_, dim_);
    }

    // `out` [num_tokens, num_heads, head_dim], rounded to T; of type T, or fp32 for a product that reads it next.
    template <typename Out>
    void run(const T* q, int64_t q_row_stride, Out* out) {
        each_row([&](HeadState& head, int64_t r, int64_t query, int64_t query_head) {
            take_query(head, r, q + query * q_row_stride + query_head * head_dim_);
        });
        for (int64_t start = 0; start < end_; start += kPartition) take_in(start, std::min(end_, start + kPartition));
        each_row([&](HeadState& head, int64_t r, int64_t query, int64_t query_head) {
            give_result(head, r, out + (query * shape_.num_heads + query_head) * head_dim_);
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

    void take_query(HeadState& head, int64_t r, const T* source) {
        if constexpr (kIntegers) {
            IntegerQuery(head.q + r * dim_, dim_).take(source, head_dim_, dim_, in_place_);
        } else if constexpr (kPairs) {
            bf16* row = pair_queries(head) + r * dim_;
            std::memset(static_cast<void*>(row + head_dim_), 0, size_t(dim_ - head_dim_) * sizeof(bf16));
            std::memcpy(static_cast<void*>(row), source, size_t(head_dim_) * sizeof(bf16));
        } else {
            float* row = head.q + r * dim_;
            std::fill(row, row + dim_, 0.0f);
            for (int64_t d = 0; d < head_dim_; d += kWidth) store(row + d, load_partial(source + d, head_dim_ - d));
        }
    }

    template <typename Out>
    void give_result(const HeadState& head, int64_t r, Out* target) const {
        const float* sums = head.accumulator + r * dim_;
        const auto give = [&](int64_t d, Vec sum) {
            if (d < head_dim_) store_partial(target + d, round_to<T>(sum / head.running_sum[r]), head_dim_ - d);
        };
        for (int64_t d = 0; d < dim_; d += kUnit) {
            alignas(64) float ordered[kUnit];
            if (kIntegers && in_place_)
                store_quads_in_order(sums + d, ordered);
            else if constexpr (kPairs || kIntegers)
                for (int64_t i = 0; i < kUnit; i += kGroup) store_pairs_in_order(sums + d + i, ordered + i);
            else
                std::memcpy(ordered, sums + d, sizeof ordered);
            for (int64_t i = 0; i < kUnit; i += kWidth) give(d + i, load(ordered + i));
        }
    }

    static bf16* pair_queries(const HeadState& head) { return reinterpret_cast<bf16*>(head.q); }
    // A row's weights of the keys from `first` of the partition on.
    static const char* weights(const HeadState& head, int64_t r, int64_t first, int64_t num_bytes) {
        return reinterpret_cast<const char*>(head.scores + r * kPartition) + first * num_bytes;
    }

    // body(rows in chunk order, position of the first, count) per chunk of the partition and head
    template <typename Body>
    void each_chunk(int64_t start, int64_t end, int64_t which, const Body& body) {
        for (int64_t position = start; position < end; position += chunk_) {
            const int64_t count = std::min(chunk_, end - position);
            locate(position, count, which);
            for (HeadState& head : heads_) {
                body(head, position, count);
                for (int64_t j = 0; j < count; ++j) addresses_[j] += shape_.kv.row_bytes;  // the next head's
            }
        }
    }

    // Addresses of the first head's rows; those that fill up the last group are zeros.
    void locate(int64_t position, int64_t count, int64_t which) {
        const int64_t stride = shape_.kv.token_bytes();
        for (int64_t j = 0; j < count;) {
            const int64_t run = pages_.run_length(position + j, position + count);
            const char* row = pages_.token(position + j, which) + item_.first_head * shape_.kv.row_bytes;
            for (const int64_t run_end = j + run; j < run_end; ++j, row += stride) addresses_[j] = row;
        }
        for (int64_t j = count; j % kGroup != 0; ++j) addresses_[j] = zeros_;
    }

    float scale_at(int64_t j) const {
        float scale;
        std::memcpy(&scale, addresses_[j] + head_dim_, sizeof scale);
        return scale;
    }

    // The scales of int8 rows; where there is none, 0.
    void load_scales(int64_t count, float factor) {
        for (int64_t j = 0; j < count; ++j) factors_[j] = scale_at(j) * factor;
        std::fill(factors_ + count, factors_ + kPartition, 0.0f);
    }

    bool scales_are_numbers() const {
        Vec sum = {};
        for (int64_t j = 0; j < kPartition; j += kWidth) sum += load(factors_ + j) * 0.0f;
        return sum_lanes(sum) == 0.0f;
    }

    // A copy of a row, zeros after its end.
    const char* stage(const char* row, int64_t i) {
        char* const staged = staged_ + i * row_bytes_;
        std::memset(staged, 0, size_t(row_bytes_));
        std::memcpy(staged, row, size_t(head_dim_) * sizeof(Kv));
        return staged;
    }

    // `count` rows, kWidth at most, that may be read to `dim_`: where they lie, if that does not go past their ends.
    const char* const* whole_rows(const char* const* rows, int64_t count) {
        if (head_dim_ == dim_) return rows;
        for (int64_t i = 0; i < count; ++i) staged_rows_[i] = stage(rows[i], i);
        return staged_rows_;
    }

    // kWidth keys as a panel of pairs takes them.
    const char* const* key_rows(const char* const* rows) {
        rows = whole_rows(rows, kWidth);
        if constexpr (!kIntegers) return rows;
        for (int64_t i = 0; i < kWidth; ++i) {
            char* const target = wide_rows_ + i * row_bytes_;
            for (int64_t d = 0; d < dim_; d += kGroup) {
                const Halves some = halves<Kv>(rows[i] + d);
                std::memcpy(target + d * 2, &some, sizeof some);
            }
            staged_rows_[i] = target;
        }
        return staged_rows_;
    }

    char* panel() const { return reinterpret_cast<char*>(panel_); }
    int64_t strip_bytes() const { return chunk_ / 2 * kGroup * 4; }

    void pack(int64_t count) {
        for (int64_t j = 0; j < count; j += kWidth) {
            if constexpr (kPairs || kIntegers)
                pack_quarters(key_rows(addresses_ + j), dim_ * 2, panel() + j * dim_ * 2);
            else
                pack_keys<Kv>(whole_rows(addresses_ + j, kWidth), dim_, panel_ + j / kGroup * dim_ * kGroup + j % kGroup);
            ahead_.advance(std::min(kWidth, count - j) * shape_.kv.row_bytes);
        }
        if (!kPairs && !kIntegers && count % kGroup != 0 && count % kGroup <= kWidth)  // the other half of the last group
            for (int64_t d = 0; d < dim_; ++d)
                store(panel_ + (count / kGroup * dim_ + d) * kGroup + kWidth, Vec{});
    }

    // The few rows of an item and the chunk's keys, read where they lie; what a row does not see is masked later.
    template <int Rows>
    void score_in_place(const HeadState& head, int64_t r, int64_t count, float* scores) {
        constexpr int64_t step = kPairs || kIntegers ? kWidth : kGroup;
        for (int64_t j = 0; j < count; j += step) {
            if constexpr (kIntegers)
                score_bytes_in_place<Rows>(head.q + r * dim_, dim_, addresses_ + j, factors_ + j, scores + j);
            else if constexpr (kPairs)
                score_pairs_in_place<Rows>(pair_queries(head) + r * dim_, dim_, addresses_ + j, factors_ + j, scores + j);
            else
                score_keys<Kv, Rows, 2>(head.q + r * dim_, dim_, addresses_ + j, factors_ + j, scores + j);
            if (r == 0) ahead_.advance(std::min(step, count - j) * shape_.kv.row_bytes);
        }
    }

    template <int Rows>
    void add_in_place(const HeadState& head, int64_t r, int64_t first, int64_t count) {
        float* const partial = head.partial + r * dim_;
        for (int64_t j = 0; j < count; j += kGroup) {
            const int64_t some = std::min(kGroup, count - j);
            if constexpr (kIntegers)
                add_value_quads_in_place<Rows>(weights(head, r, first + j, 1), addresses_ + j, ceil_div(some, 4), dim_,
                                               partial);
            else if constexpr (kPairs)
                add_value_pairs_in_place<Rows>(weights(head, r, first + j, 2), addresses_ + j, ceil_div(some, 2), dim_,
                                               partial);
            else
                add_values_in_place<Kv, Rows>(head.scores + r * kPartition + first + j, addresses_ + j, head_dim_, some,
                                              dim_, partial);
            if (r == 0) ahead_.advance(some * shape_.kv.row_bytes);
        }
    }

    // Positions in [position, position + count) that the row sees.
    int64_t visible(int64_t row, int64_t position, int64_t count) const {
        return std::clamp<int64_t>(first_position_ + row / shape_.group + 1 - position, 0, count);
    }

    // The partition at [start, end) into every row that sees it.
    void take_in(int64_t start, int64_t end) {
        const int64_t from = std::max<int64_t>(0, start - first_position_) * shape_.group;  // rows before do not
        each_chunk(start, end, 0, [&](HeadState& head, int64_t position, int64_t count) {
            if constexpr (kInt8) load_scales(count, shape_.scale);
            float* const scores = head.scores + position - start;
            if (in_place_) {
                by_rows<kMostInPlace>(0, rows_, [&](int64_t r, auto rows) {
                    score_in_place<rows.value>(head, r, count, scores + r * kPartition);
                });
                return;
            }
            pack(count);
            by_rows(from, rows_, [&](int64_t r, auto rows) {
                const int64_t num_keys = visible(r + rows.value - 1, position, count);
                float* const target = scores + r * kPartition;
                if constexpr (kIntegers)
                    score_shorts<rows.value>(head.q + r * dim_, dim_, panel(), num_keys, factors_, target);
                else if constexpr (kPairs)
                    score_pairs<rows.value>(pair_queries(head) + r * dim_, dim_, panel(), num_keys, factors_, target);
                else
                    score_groups<rows.value>(head.q + r * dim_, dim_, panel_, ceil_div(num_keys, kGroup), factors_,
                                             target);
            });
        });
        if constexpr (kInt8) locate(start, end - start, 1);
        for (HeadState& head : heads_) {
            if constexpr (kInt8) load_scales(end - start, 1.0f);
            const bool all_numbers = !kIntegers || scales_are_numbers();
            for (int64_t r = from; r < rows_; ++r) {
                const float rescale = to_weights(head, r, visible(r, start, kPartition), all_numbers);
                for (int64_t d = r * dim_; d < (r + 1) * dim_; d += kWidth)
                    store(head.accumulator + d, load(head.accumulator + d) * rescale);
            }
            std::fill(head.partial + from * dim_, head.partial + rows_ * dim_, 0.0f);
            if constexpr (kInt8)
                for (int64_t j = 0; j < end - start; ++j) addresses_[j] += shape_.kv.row_bytes;
        }
        each_chunk(start, end, 1, [&](HeadState& head, int64_t position, int64_t count) {
            const int64_t first = position - start;
            if (in_place_) {
                by_rows<kMostInPlace>(0, rows_, [&](int64_t r, auto rows) { add_in_place<rows.value>(head, r, first, count); });
                return;
            }
            widen(count);
            by_rows(from, rows_, [&](int64_t r, auto rows) {
                const int64_t num_keys = visible(r + rows.value - 1, position, count);
                float* const partial = head.partial + r * dim_;
                if constexpr (kPairs || kIntegers)
                    add_value_pairs<std::conditional_t<kPairs, Bf16Pair, ShortPair>, rows.value>(
                        weights(head, r, first, 2), panel(), strip_bytes(), ceil_div(num_keys, 2), dim_, partial);
                else
                    add_values<rows.value>(head.scores + first + r * kPartition, panel_, chunk_ * kGroup, num_keys, dim_,
                                           partial);
            });
        });
        for (HeadState& head : heads_)
            for (int64_t r = from; r < rows_; ++r)
                for (int64_t i = r * dim_; i < (r + 1) * dim_; i += kWidth)
                    store(head.accumulator + i, load(head.accumulator + i) + partial_sums(head, r, i));
    }

    static Vec partial_sums(const HeadState& head, int64_t r, int64_t i) {
        if constexpr (kIntegers)
            return __builtin_convertvector(load_words(head.partial + i), Vec) *
                   *IntegerWeights(head.scores + r * kPartition).scale;
        return load(head.partial + i);
    }

    // A row's scores to weights of the values, whose scales are in factors_.
    float to_weights(const HeadState& head, int64_t r, int64_t num_visible, [[maybe_unused]] bool all_numbers) {
        float* const scores = head.scores + r * kPartition;
        float &running_max = head.running_max[r], &running_sum = head.running_sum[r];
        if constexpr (kIntegers)
            return (all_numbers ? IntegerWeights::take<true> : IntegerWeights::take<false>)(
                scores, num_visible, factors_, in_place_, running_max, running_sum);
        const float rescale = softmax_row<std::conditional_t<kPairs, bf16, float>>(scores, num_visible, running_max, running_sum);
        if constexpr (kInt8)
            for (int64_t j = 0; j < kPartition; j += kWidth) store(scores + j, load(scores + j) * load(factors_ + j));
        return rescale;
    }

    void widen(int64_t count) {
        if constexpr (kPairs || kIntegers) {
            for (int64_t j = 0; j < count; j += 2) {  // after the last one lie zeros
                const char* const* rows = whole_rows(addresses_ + j, 2);
                pack_pair<Kv>(rows[0], rows[1], dim_, strip_bytes(), panel() + j / 2 * kGroup * 4);
                if (j % kWidth == kWidth - 2) ahead_.advance(kWidth * shape_.kv.row_bytes);
            }
            return;
        }
        for (int64_t j = 0; j < count; ++j) {
            widen_value<Kv>(addresses_[j], head_dim_, dim_, chunk_ * kGroup, panel_ + j * kGroup);
            if (j % kWidth == kWidth - 1) ahead_.advance(kWidth * shape_.kv.row_bytes);
        }
    }

    const Item& item_;
    const Shape& shape_;
    const Pages pages_;
    const int64_t head_dim_, dim_, rows_, first_position_, end_, chunk_;
    const bool in_place_;  // so few rows that packing does not pay
    Ahead ahead_;
    float* panel_;       // keys: [groups of the chunk, dim, kGroup]; values: [strips, chunk, kGroup]
    const char* zeros_;  // a row
    char *staged_, *wide_rows_;  // kWidth rows of row_bytes_ each
    int64_t row_bytes_;
    std::vector<HeadState> heads_;
    const char *addresses_[kPartition], *staged_rows_[kWidth];
    alignas(64) float factors_[kPartition];
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
            Out* out, const Item* then) {
    const auto first_position = [&](const Item& of) {
        return context_lens[of.sequence] - query_starts[of.sequence + 1] + of.first_query;
    };
    const auto table = [&](const Item& of) { return block_tables + of.sequence * max_blocks; };
    const Pages pages{pool, table(item), shape};
    Reading next{};
    if (then != nullptr) next = reading_of(*then, shape, table(*then), first_position(*then) + then->num_queries);
    const Reading* const comes = then == nullptr ? nullptr : &next;
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
                              int64_t num_threads) {
    const int64_t bad = first_unfit(query_starts, context_lens, block_tables, max_blocks, num_seqs, num_tokens,
                                    num_blocks, block_size);
    if (bad >= 0) return bad;
    const KvShape kv(num_layers, block_size, num_kv_heads, head_dim, is_int8, is_bf16);
    const Shape shape(kv, num_heads, scale, layer);
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

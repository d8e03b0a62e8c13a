// One item of attention: some KV heads of a sequence and a tile of its queries (`attention.h`).
//
// For each of its KV heads an item has `rows` = queries x query heads of the group, in position order. It walks the
// partitions of its sequence from position 0:
// 1. keys, a chunk at a time, meet every row that sees them: scores. A few rows read them in place, for many they are
//    packed to an fp32 panel first. What is asked of memory meanwhile is told at `Ahead`;
// 2. each row's max, exp and sum over the keys of the partition that it sees;
// 3. values, likewise: the partition's weighted sum;
// 4. the row's running (max, sum, accumulator) is rescaled and takes the partition in. A row that does not see
//    a partition skips it.
//
// Where the model is bf16 and the machine has dot products, keys and values of bf16 meet queries and weights of bf16 by
// pairs (`attention_pairs.h`), and those of int8 meet integers (`attention_bytes.h`), many rows by the matrix unit where it
// is lent (`attention_amx_bytes.h`). Where bf16 is left to the unit, `attention_amx.h` is what computes an item.
//
// Orders that make the bits: a score is one chain over head_dim, times the key's factor (the softmax scale, and in int8
// the key's own); a partition's sum is one chain per lane over the partition and a fixed tree over lanes; its weighted
// sum is one chain in key order per element. With pairs, chains are over pairs, a score's are four, and weights
// meet values rounded to bf16; sums of integers are exact. None depends on the item, so a decode step and a prefill chunk
// agree (where values are finite: a later key of a tile has weight 0, but is multiplied).
#pragma once

#include "attention_amx_bytes.h"
#include "attention_chunk.h"
#include "attention_head.h"
#include "attention_pages.h"
#include "attention_pairs.h"
#include "attention_tiles.h"
#include "attention_weights.h"
#include "simd.h"
#include "threads.h"

namespace baton {

constexpr int64_t kFewKeys = 2 * kGroup;  // a chunk where rows are few; else a whole partition

// `ByTiles`: of integers, by the matrix unit, which this thread has a session of.
template <typename T, typename Kv, bool ByTiles = false>
class Attention {
    static constexpr bool kInt8 = sizeof(Kv) == 1;
    static constexpr bool kPairs = kHasDot && std::is_same_v<T, bf16> && !kInt8;
    static constexpr bool kIntegers = kHasDot && std::is_same_v<T, bf16> && kInt8;
    static_assert(kIntegers || !ByTiles);
    static constexpr int kMostInPlace = kIntegers ? kMostByteRows : kMostRows;
    static constexpr int64_t kUnit = kIntegers ? kQuadGroup : kGroup;  // elements that are taken at once

public:
    Attention(const Item& item, const Shape& shape, const Pages& pages, int64_t first_position, const Reading* then)
        : item_(item), shape_(shape), pages_(pages), head_dim_(shape.kv.head_dim),
          dim_(ceil_div(head_dim_, kUnit) * kUnit), rows_(item.num_queries * shape.group), first_position_(first_position),
          end_(first_position + item.num_queries), chunk_(!ByTiles && rows_ < 4 * kMostRows ? kFewKeys : kPartition),
          in_place_(!ByTiles && rows_ <= kMostRows && head_dim_ % kUnit == 0), as_bytes_(ByTiles || in_place_),
          memory_rows_(ByTiles ? ceil_div(rows_, kTileLines) * kTileLines : rows_), memory_(take_memory()),
          chunk_rows_(pages_, item, dim_, memory_), ahead_(pages_, reading_of(item, shape, pages.block_table, end_), then) {
        panel_ = memory_ + ChunkRows<Kv>::num_floats(dim_);
        float* const states = panel_ + chunk_ * dim_;
        const int64_t state_floats = HeadState::num_floats(memory_rows_, dim_);
        heads_.reserve(size_t(item.num_heads));
        for (int64_t head = 0; head < item.num_heads; ++head)
            heads_.emplace_back(states + head * state_floats, memory_rows_, dim_);
    }

    // `out` [num_tokens, num_heads, head_dim], rounded to T; of type T, or fp32 for a product that reads it next.
    template <typename Out>
    void run(const T* q, int64_t q_row_stride, Out* out) {
        each_row(item_, shape_, heads_, [&](HeadState& head, int64_t r, int64_t query, int64_t query_head) {
            take_query(head, r, q + query * q_row_stride + query_head * head_dim_);
        });
        for (int64_t start = 0; start < end_; start += kPartition) take_in(start, std::min(end_, start + kPartition));
        each_row(item_, shape_, heads_, [&](HeadState& head, int64_t r, int64_t query, int64_t query_head) {
            give_result(head, r, out + (query * shape_.num_heads + query_head) * head_dim_);
        });
    }

private:
    void take_query(HeadState& head, int64_t r, const T* source) {
        if constexpr (kIntegers) {
            IntegerQuery(head.q + r * dim_, dim_).take(source, head_dim_, dim_, as_bytes_);
        } else if constexpr (kPairs) {
            bf16* row = head.pairs() + r * dim_;
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
        for (int64_t d = 0; d < dim_; d += kUnit) {
            alignas(64) Vec ordered[kUnit / kWidth];
            load_in_order<kUnit>(sums + d, interleaved(), ordered);
            for (int64_t i = 0; d + i < std::min(d + kUnit, head_dim_); i += kWidth)
                store_partial(target + d + i, round_to<T>(ordered[i / kWidth] / head.running_sum[r]), head_dim_ - d - i);
        }
    }

    Interleaved interleaved() const {
        if constexpr (!kPairs && !kIntegers) return Interleaved::kNot;
        return as_bytes_ ? Interleaved::kQuads : Interleaved::kPairs;
    }

    // body(rows in chunk order, position of the first, count) per chunk of the partition and head
    template <typename Body>
    void each_chunk(int64_t start, int64_t end, int64_t which, const Body& body) {
        for (int64_t position = start; position < end; position += chunk_) {
            const int64_t count = std::min(chunk_, end - position);
            chunk_rows_.locate(position, count, which);
            for (HeadState& head : heads_) {
                body(head, position, count);
                chunk_rows_.next_head(count);
            }
        }
    }

    char* panel() const { return reinterpret_cast<char*>(panel_); }
    int64_t strip_bytes() const { return chunk_ / 2 * kGroup * 4; }

    void pack(int64_t count) {
        for (int64_t j = 0; j < count; j += kWidth) {
            if constexpr (ByTiles)
                pack_key_bytes(chunk_rows_.whole(j, kWidth), dim_, panel() + j * dim_);
            else if constexpr (kPairs || kIntegers)
                pack_quarters(kPairs ? chunk_rows_.whole(j, kWidth) : chunk_rows_.halved(j), dim_ * 2, panel() + j * dim_ * 2);
            else
                pack_keys<Kv>(chunk_rows_.whole(j, kWidth), dim_, panel_ + j / kGroup * dim_ * kGroup + j % kGroup);
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
        const float* const factors = chunk_rows_.factors();
        for (int64_t j = 0; j < count; j += step) {
            if constexpr (kIntegers)
                score_bytes_in_place<Rows>(head.q + r * dim_, dim_, chunk_rows_.from(j), factors + j, scores + j);
            else if constexpr (kPairs)
                score_pairs_in_place<Rows>(head.pairs() + r * dim_, dim_, chunk_rows_.from(j), factors + j, scores + j);
            else
                score_keys<Kv, Rows, 2>(head.q + r * dim_, dim_, chunk_rows_.from(j), factors + j, scores + j);
            if (r == 0) ahead_.advance(std::min(step, count - j) * shape_.kv.row_bytes);
        }
    }

    template <int Rows>
    void add_in_place(const HeadState& head, int64_t r, int64_t first, int64_t count) {
        float* const partial = head.partial + r * dim_;
        for (int64_t j = 0; j < count; j += kGroup) {
            const int64_t some = std::min(kGroup, count - j);
            if constexpr (kIntegers)
                add_value_quads_in_place<Rows>(head.weights(r, first + j, 1), chunk_rows_.from(j), ceil_div(some, 4), dim_, partial);
            else if constexpr (kPairs)
                add_value_pairs_in_place<Rows>(head.weights(r, first + j, 2), chunk_rows_.from(j), ceil_div(some, 2), dim_, partial);
            else
                add_values_in_place<Kv, Rows>(head.scores + r * kPartition + first + j, chunk_rows_.from(j), head_dim_, some,
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
            if constexpr (kInt8) chunk_rows_.load_scales(count, shape_.scale);
            float* const scores = head.scores + position - start;
            if (in_place_) {
                by_rows<kMostInPlace>(0, rows_, [&](int64_t r, auto rows) {
                    score_in_place<rows.value>(head, r, count, scores + r * kPartition);
                });
                return;
            }
            pack(count);
            const float* const factors = chunk_rows_.factors();
            if constexpr (ByTiles) {  // keys after the last one may be anything
                each_tile(from, [&](int64_t r, int64_t rows) {
                    score_byte_tiles(head.q + r * dim_, rows, dim_, panel(), visible(r + rows - 1, start, count), factors,
                                     scores + r * kPartition);
                });
                return;
            }
            by_rows(from, rows_, [&](int64_t r, auto rows) {
                const int64_t num_keys = visible(r + rows.value - 1, position, count);
                float* const target = scores + r * kPartition;
                if constexpr (kIntegers)
                    score_shorts<rows.value>(head.q + r * dim_, dim_, panel(), num_keys, factors, target);
                else if constexpr (kPairs)
                    score_pairs<rows.value>(head.pairs() + r * dim_, dim_, panel(), num_keys, factors, target);
                else
                    score_groups<rows.value>(head.q + r * dim_, dim_, panel_, ceil_div(num_keys, kGroup), factors, target);
            });
        });
        if constexpr (kInt8) chunk_rows_.locate(start, end - start, 1);
        for (HeadState& head : heads_) {
            if constexpr (kInt8) chunk_rows_.load_scales(end - start, 1.0f);
            const bool all_numbers = !kIntegers || chunk_rows_.scales_are_numbers();
            if constexpr (kIntegers)
                for (int64_t r = from; r < rows_; r += kMostWeighed) to_integer_weights(head, r, start, all_numbers);
            for (int64_t r = from; !ByTiles && r < rows_; ++r) {  // by tiles with what the partition adds
                const float rescale = rescale_of(head, r, visible(r, start, kPartition));
                for (int64_t d = r * dim_; d < (r + 1) * dim_; d += kWidth)
                    store(head.accumulator + d, load(head.accumulator + d) * rescale);
            }
            if constexpr (!ByTiles) std::fill(head.partial + from * dim_, head.partial + rows_ * dim_, 0.0f);
            if constexpr (kInt8) chunk_rows_.next_head(end - start);
        }
        each_chunk(start, end, 1, [&](HeadState& head, int64_t position, int64_t count) {
            const int64_t first = position - start;
            if (in_place_) {
                by_rows<kMostInPlace>(0, rows_, [&](int64_t r, auto rows) { add_in_place<rows.value>(head, r, first, count); });
                return;
            }
            widen(count);
            if constexpr (ByTiles) {
                each_tile(from, [&](int64_t r, int64_t rows) {
                    add_value_byte_tiles(head.scores + r * kPartition, std::max<int64_t>(0, from - r), rows, dim_, panel(),
                                         visible(r + rows - 1, start, count), head.accumulator + r * dim_);
                });
                return;
            }
            by_rows(from, rows_, [&](int64_t r, auto rows) {
                const int64_t num_keys = visible(r + rows.value - 1, position, count);
                float* const partial = head.partial + r * dim_;
                if constexpr (kPairs || kIntegers)
                    add_value_pairs<std::conditional_t<kPairs, Bf16Pair, ShortPair>, rows.value>(
                        head.weights(r, first, 2), panel(), strip_bytes(), ceil_div(num_keys, 2), dim_, partial);
                else
                    add_values<rows.value>(head.scores + first + r * kPartition, panel_, chunk_ * kGroup, num_keys, dim_,
                                           partial);
            });
        });
        if constexpr (ByTiles) return;
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

    // Scores of some rows from r on to integer weights of the values, whose scales are the chunk's factors.
    void to_integer_weights(const HeadState& head, int64_t r, int64_t start, bool all_numbers) const {
        const auto seen = [&](int64_t i) { return visible(r + i, start, kPartition); };
        const auto take = [&](auto all) {
            IntegerWeights::take<all.value>(head.scores + r * kPartition, std::min(kMostWeighed, rows_ - r), seen,
                                            chunk_rows_.factors(), as_bytes_, head.running_max + r, head.running_sum + r);
        };
        all_numbers ? take(std::true_type()) : take(std::false_type());
    }

    // The factor for what a row has accumulated; but for integers, its scores become weights.
    float rescale_of(const HeadState& head, int64_t r, int64_t num_visible) {
        float* const scores = head.scores + r * kPartition;
        if constexpr (kIntegers) return *IntegerWeights(scores).rescale;
        const float rescale = softmax_row<std::conditional_t<kPairs, bf16, float>>(scores, num_visible, head.running_max[r],
                                                                                   head.running_sum[r]);
        if constexpr (kInt8)
            for (int64_t j = 0; j < kPartition; j += kWidth) store(scores + j, load(scores + j) * load(chunk_rows_.factors() + j));
        return rescale;
    }

    // body(first row, count) of each tile with rows from `from` on.
    template <typename Body>
    void each_tile(int64_t from, const Body& body) const {
        for (int64_t r = from / kTileLines * kTileLines; r < rows_; r += kTileLines) body(r, std::min(kTileLines, rows_ - r));
    }

    void widen(int64_t count) {
        if constexpr (ByTiles) {  // after the last one lies anything: its weight is 0
            for (int64_t j = 0; j < count; j += 4) {
                pack_value_bytes(chunk_rows_.whole(j, 4), j / 4, dim_, panel());
                if (j % kWidth == kWidth - 4) ahead_.advance(kWidth * shape_.kv.row_bytes);
            }
            return;
        }
        if constexpr (kPairs || kIntegers) {
            for (int64_t j = 0; j < count; j += 2) {  // after the last one lie zeros
                const char* const* rows = chunk_rows_.whole(j, 2);
                pack_pair<Kv>(rows[0], rows[1], dim_, strip_bytes(), panel() + j / 2 * kGroup * 4);
                if (j % kWidth == kWidth - 2) ahead_.advance(kWidth * shape_.kv.row_bytes);
            }
            return;
        }
        for (int64_t j = 0; j < count; ++j) {
            widen_value<Kv>(*chunk_rows_.from(j), head_dim_, dim_, chunk_ * kGroup, panel_ + j * kGroup);
            if (j % kWidth == kWidth - 1) ahead_.advance(kWidth * shape_.kv.row_bytes);
        }
    }

    float* take_memory() const {
        static thread_local Scratch scratch;
        return scratch.floats(ChunkRows<Kv>::num_floats(dim_) + chunk_ * dim_ +
                              item_.num_heads * HeadState::num_floats(memory_rows_, dim_));
    }

    const Item& item_;
    const Shape& shape_;
    const Pages pages_;
    const int64_t head_dim_, dim_, rows_, first_position_, end_, chunk_;
    const bool in_place_;  // so few rows that packing does not pay
    const bool as_bytes_;  // of integers: queries and weights, and values interleaved by four
    const int64_t memory_rows_;  // whole tiles of them
    float* const memory_;
    ChunkRows<Kv> chunk_rows_;
    Ahead ahead_;
    float* panel_;  // keys: [groups of the chunk, dim, kGroup]; values: [strips, chunk, kGroup]
    std::vector<HeadState> heads_;
};

}  // namespace baton

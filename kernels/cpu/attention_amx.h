// Attention of bf16 models over bf16 keys and values by the matrix unit (`amx_unit.h`): the walk of `attention_item.h`
// with both products in tiles.
//
// 1. Many rows: a partition's keys and values are packed once, keys turned over and values interleaved, as panels of
//    columns [tile depths][16 lines][2 tiles]. Two tiles of rows at a time then meet keys, and their scores become weights
//    in the first cache; when all have, they meet values. Panels that none of the two sees are left out.
// 2. Few rows: keys are read where they lie, as the rows of a product whose columns are the queries, and the scores turned
//    over. Values are packed a tile depth at a time, and meet their weights while they are in the first cache; sums wait in
//    memory meanwhile. Of all heads in turn, as memory has both.
//
// Bits: a score adds up tiles of 32 elements in order, a partition's weighted sum tiles of 32 keys in order, whichever
// operand is which: within a tile the order is the hardware's, and a product commutes. Tiles of weights 0 that only some
// ways multiply add nothing (where values are finite: one that is not also reaches the earlier rows of two tiles of rows, one
// of which sees it). All else is in an order of the row's own (`weigh_rows`).
#pragma once

#include "amx_unit.h"
#include "attention_chunk.h"
#include "attention_pages.h"
#include "attention_pairs.h"
#include "attention_weights.h"

namespace baton {

constexpr int64_t kPairLineBytes = 2 * kLine, kPairTileBytes = 2 * kTileBytes;  // two tiles side by side
constexpr int64_t kTileKeys = 2 * kTileLines;  // of a panel of keys, and of a tile depth of values
constexpr int64_t kPairRows = 2 * kTileLines;  // of a pair of tiles

// Tiles of rows: lines `stride` bytes apart, their tile depths one after the other.
struct TileRows {
    const char* data;
    int64_t stride;
};

// A tile of rows, or a pair of whole ones, times a panel of 32 columns. Lines of `out` are `out_bytes` apart.
void tile_sums(bool pair, const TileRows& rows, const char* panel, int64_t steps, float* out, int64_t out_bytes);

// Twice 16 keys times queries [steps][16 pairs][16 rows]: scores [32 keys][16 rows].
void few_scores(const TileRows (&keys)[2], const char* queries, int64_t steps, float* scores);

// A tile of rows, one tile depth of it, times `groups` panels of as much: what is in `sums` goes on, or they begin with it.
// Lines of `sums` are `sum_bytes` apart.
void few_values(const TileRows& rows, const char* panels, int64_t groups, bool begins, float* sums, int64_t sum_bytes);

// Memory for one thing after the other, each on lines of its own; from null it tells how much they need.
class Carver {
public:
    explicit Carver(float* memory) : start_(memory) {}
    float* take(int64_t num_floats) {
        float* const here = start_ == nullptr ? nullptr : start_ + taken_;
        taken_ += ceil_div(num_floats, 16) * 16;
        return here;
    }
    int64_t taken() const { return taken_; }

private:
    float* const start_;
    int64_t taken_ = 0;
};

class TileAttention {
public:
    TileAttention(const Item& item, const Shape& shape, const Pages& pages, int64_t first_position, const Reading* then)
        : item_(item), shape_(shape), pages_(pages), head_dim_(shape.kv.head_dim),
          dim_(ceil_div(head_dim_, kGroup) * kGroup), rows_(item.num_queries * shape.group),
          first_position_(first_position), end_(first_position + item.num_queries), is_few_(rows_ <= kTileLines),
          at_once_(is_few_ ? kTileLines : kPairRows), tile_rows_(ceil_div(rows_, at_once_) * at_once_),
          heads_(size_t(item.num_heads)),
          keys_(pages_, item, dim_, (carve(), key_rows_)), values_(pages_, item, dim_, value_rows_),
          ahead_(pages_, reading_of(item, shape, pages.block_table, end_), then) {}

    // `out` as of `Attention`.
    template <typename Out>
    void run(const bf16* q, int64_t q_row_stride, Out* out) {
        AmxSession::Tiles tiles;
        if (is_few_) tiles[0] = tiles[1] = tiles[4] = rows_;
        const AmxSession session(tiles);
        each_row(item_, shape_, heads_, [&](Head& head, int64_t r, int64_t query, int64_t query_head) {
            take_query(head, r, q + query * q_row_stride + query_head * head_dim_);
        });
        for (int64_t start = 0; start < end_; start += kPartition) {
            const int64_t count = std::min(end_ - start, kPartition);
            is_few_ ? few_take_in(start, count) : many_take_in(start, count);
        }
        for (Head& head : heads_)
            for (int64_t r = 0; r < tile_rows_; r += kWidth) store(head.sum + r, 1.0f / load(head.sum + r));
        each_row(item_, shape_, heads_, [&](Head& head, int64_t r, int64_t query, int64_t query_head) {
            give_result(head.accumulator + r * dim_, head.sum[r],
                        out + (query * shape_.num_heads + query_head) * head_dim_);
        });
    }

private:
    // One KV head's share of the item.
    struct Head {
        bf16* q;             // many rows: [rows, dim]; few: [tile depths][16 pairs][16 rows]
        float* accumulator;  // [rows, dim], elements in the order of `interleave`
        float *max, *sum;    // [rows]
        // of a partition, rows at once; many rows: the same memory for all heads
        float *scores, *partial;  // [kPartition], [dim]
        bf16* weights;            // [rows, kPartition]
        float* rescale;           // [rows]
    };

    void carve() {
        static thread_local Scratch scratch;
        Carver counter(nullptr);
        carve(counter);
        Carver carver(scratch.floats(counter.taken()));
        carve(carver);
        for (const Head& head : heads_) {
            std::memset(static_cast<void*>(head.q), 0, size_t(tile_rows_ * dim_) * sizeof(bf16));
            std::fill(head.accumulator, head.accumulator + rows_ * dim_, 0.0f);
            std::fill(head.max, head.max + tile_rows_, -kInfinity);
            std::fill(head.sum, head.sum + tile_rows_, 0.0f);
        }
    }

    void carve(Carver& carver) {
        const auto take_bytes = [&](int64_t bytes) { return reinterpret_cast<char*>(carver.take(ceil_div(bytes, 4))); };
        const int64_t chunk_rows = ChunkRows<bf16>::num_floats(dim_);
        key_rows_ = carver.take(chunk_rows), value_rows_ = carver.take(chunk_rows);
        keys_packed_ = take_bytes((is_few_ ? kTileKeys : kPartition) * dim_ * 2);
        values_packed_ = take_bytes((is_few_ ? kTileKeys : kPartition) * dim_ * 2);
        turned_ = carver.take(is_few_ ? kTileKeys * kTileLines : 0);
        for (Head& head : heads_) {
            if (is_few_ || &head == &heads_[0]) {
                head.scores = carver.take((is_few_ ? rows_ : at_once_) * kPartition);
                head.partial = carver.take((is_few_ ? rows_ : at_once_) * dim_);
                head.weights = reinterpret_cast<bf16*>(carver.take(tile_rows_ * kPartition / 2));
                head.rescale = carver.take(tile_rows_);
            } else {
                const Head& first = heads_[0];
                head.scores = first.scores, head.partial = first.partial, head.weights = first.weights;
                head.rescale = first.rescale;
            }
            head.q = reinterpret_cast<bf16*>(take_bytes(tile_rows_ * dim_ * 2));
            head.accumulator = carver.take(rows_ * dim_);
            head.max = carver.take(tile_rows_), head.sum = carver.take(tile_rows_);
        }
    }

    void take_query(Head& head, int64_t r, const bf16* source) const {
        if (!is_few_) {
            std::memcpy(static_cast<void*>(head.q + r * dim_), source, size_t(head_dim_) * sizeof(bf16));
            return;
        }
        for (int64_t d = 0; d < head_dim_; d += 2)
            std::memcpy(static_cast<void*>(head.q + (d / 2 * kTileLines + r) * 2), source + d,
                        size_t(std::min<int64_t>(2, head_dim_ - d)) * sizeof(bf16));
    }

    template <typename Out>
    void give_result(const float* sums, float factor, Out* target) const {
        alignas(64) float ordered[kGroup];
        for (int64_t d = 0; d < dim_; d += kGroup) {
            store_pairs_in_order(sums + d, ordered);
            for (int64_t i = 0; i < kGroup && d + i < head_dim_; i += kWidth)
                store_partial(target + d + i, round_to<bf16>(load(ordered + i) * factor), head_dim_ - d - i);
        }
    }

    // Of the partition at `start`, positions that a row sees.
    int64_t visible(int64_t row, int64_t start) const {
        return std::clamp<int64_t>(first_position_ + row / shape_.group + 1 - start, 0, kPartition);
    }

    float unit() const { return shape_.scale * 1.44269504088896341f; }

    // Scores of rows [first, first + count) of the partition at `start` to their weights, of `panels` of keys.
    void weigh(const Head& head, int64_t first, int64_t count, int64_t start, int64_t panels) const {
        for (int64_t r = 0; r < count; r += kTileLines)
            weigh_rows(
                head.scores + r * kPartition, head.weights + (first + r) * kPartition, std::min(kTileLines, count - r),
                [&](int64_t i) { return visible(first + r + i, start); }, panels * kTileKeys, unit(), head.max + first + r,
                head.sum + first + r, head.rescale + first + r);
    }

    // Values of `panels` of keys to what these rows have.
    void add_values(const Head& head, int64_t first, int64_t count, int64_t panels) const {
        const TileRows weights{reinterpret_cast<const char*>(head.weights + first * kPartition), kPartition * 2};
        for (int64_t d = 0; d < dim_; d += kGroup)
            tile_sums(count > kTileLines, weights, values_packed_ + d * kPartition * 2, panels, head.partial + d, dim_ * 4);
        take_partial(head, first, count);
    }

    // What `partial` has of a partition to what these rows have.
    void take_partial(const Head& head, int64_t first, int64_t count) const {
        for (int64_t r = 0; r < count; ++r) {
            float *const sums = head.accumulator + (first + r) * dim_, *const partial = head.partial + r * dim_;
            const float rescale = head.rescale[first + r];
            for (int64_t d = 0; d < dim_; d += kWidth)  // + 0: never -0, so a row may take in a partition it does not see
                store(sums + d, load(sums + d) * rescale + (load(partial + d) + 0.0f));
        }
    }

    // body(first row, count, panels of keys that they see at most) of each pair of tiles that sees the partition.
    template <typename Body>
    void each_pair(int64_t start, const Body& body) const {
        const int64_t from = std::max<int64_t>(0, start - first_position_) * shape_.group;  // rows before do not
        for (int64_t first = from / kPairRows * kPairRows; first < rows_; first += kPairRows) {
            const int64_t count = std::min(kPairRows, rows_ - first);
            body(first, count, ceil_div(visible(first + count - 1, start), kTileKeys));
        }
    }

    void many_take_in(int64_t start, int64_t count) {
        keys_.locate(start, count, 0), values_.locate(start, count, 1);
        for (const Head& head : heads_) {
            for (int64_t j = 0; j < ceil_div(count, kTileKeys) * kTileKeys; j += kTileLines) {
                turn_keys(keys_.whole(j, kTileLines), dim_ * 2,
                          key_panel(j / kTileKeys) + j % kTileKeys / kTileLines * kLine);
                ahead_.advance(std::clamp<int64_t>(count - j, 0, kTileLines) * shape_.kv.row_bytes);
            }
            pack_values(count, kPartition);
            each_pair(start, [&](int64_t first, int64_t some, int64_t panels) {
                const TileRows queries{reinterpret_cast<const char*>(head.q + first * dim_), dim_ * 2};
                for (int64_t panel = 0; panel < panels; ++panel)
                    tile_sums(some > kTileLines, queries, key_panel(panel), dim_ / kGroup, head.scores + panel * kTileKeys,
                              kPartition * 4);
                weigh(head, first, some, start, panels);
            });
            each_pair(start, [&](int64_t first, int64_t some, int64_t panels) { add_values(head, first, some, panels); });
            keys_.next_head(count), values_.next_head(count);
        }
    }

    void few_take_in(int64_t start, int64_t count) {
        each_chunk(keys_, start, count, 0, [&](const Head& head, int64_t j, int64_t some) {
            const TileRows tiles[2] = {whole_keys(start + j, 0), whole_keys(start + j, kTileLines)};
            few_scores(tiles, reinterpret_cast<const char*>(head.q), dim_ / kGroup, turned_);
            turn_scores(head.scores + j);
            ahead_.advance(some * shape_.kv.row_bytes);
        });
        for (const Head& head : heads_) weigh(head, 0, rows_, start, ceil_div(count, kTileKeys));
        each_chunk(values_, start, count, 1, [&](const Head& head, int64_t j, int64_t some) {
            pack_values(some, kTileKeys);
            const TileRows weights{reinterpret_cast<const char*>(head.weights + j), kPartition * 2};
            few_values(weights, values_packed_, dim_ / kGroup, j == 0, head.partial, dim_ * 4);
        });
        for (const Head& head : heads_) take_partial(head, 0, rows_);
    }

    // body(head, first key, count) of each head's keys or values, kTileKeys at a time.
    template <typename Body>
    void each_chunk(ChunkRows<bf16>& rows, int64_t start, int64_t count, int64_t which, const Body& body) {
        for (int64_t j = 0; j < count; j += kTileKeys) {
            const int64_t some = std::min(kTileKeys, count - j);
            rows.locate(start + j, some, which);
            for (const Head& head : heads_) body(head, j, some), rows.next_head(some);
        }
    }

    // 16 keys from the i-th of the chunk at `position` on: where they lie, if they are whole tiles there. What follows the
    // last key of the sequence in its block may be anything: scores of it are hidden.
    TileRows whole_keys(int64_t position, int64_t i) const {
        const char* const first = *keys_.from(i);
        const bool is_there = position + i < end_;
        if (is_there && head_dim_ == dim_ && pages_.run_length(position + i, position + i + kTileLines) == kTileLines)
            return {first, shape_.kv.token_bytes()};
        char* const staged = keys_packed_ + i * dim_ * 2;
        const char* const* const rows = keys_.from(i);
        for (int64_t k = 0; k < kTileLines; ++k) {
            std::memcpy(staged + k * dim_ * 2, rows[k], size_t(head_dim_) * sizeof(bf16));
            std::memset(staged + k * dim_ * 2 + head_dim_ * 2, 0, size_t(dim_ - head_dim_) * sizeof(bf16));
        }
        return {staged, dim_ * 2};
    }

    // Scores of few rows and a chunk of keys as rows.
    void turn_scores(float* scores) const {
        const char* lines[kWidth];
        for (int64_t j = 0; j < kTileKeys; j += kWidth) {
            for (int64_t i = 0; i < kWidth; ++i) lines[i] = reinterpret_cast<const char*>(turned_ + (j + i) * kTileLines);
            for (int64_t r = 0; r < rows_; r += 4) {
                UintVec words[4];
                load_words(lines, r * 4, words);
                for (int64_t i = 0; i < std::min<int64_t>(4, rows_ - r); ++i)
                    store(scores + (r + i) * kPartition + j, Vec(words[i]));
            }
        }
    }

    // 16 keys to every second line of a panel: a line has a pair of elements of each.
    static void turn_keys(const char* const* keys, int64_t num_bytes, char* line) {
        for (int64_t byte = 0; byte < num_bytes; byte += 16) {
            UintVec words[4];
            load_words(keys, byte, words);
            for (int w = 0; w < 4; ++w, line += kPairLineBytes) std::memcpy(line, &words[w], sizeof words[w]);
        }
    }

    // The `count` values that were located, to panels of `panel_keys`; a tile depth ends with zeros.
    void pack_values(int64_t count, int64_t panel_keys) {
        char* line = values_packed_;
        for (int64_t i = 0; i < ceil_div(count, kTileKeys) * kTileKeys; i += 2, line += kPairLineBytes) {
            const char* const* rows = values_.whole(i, 2);
            pack_pair<bf16>(rows[0], rows[1], dim_, panel_keys / 2 * kPairLineBytes, line);
            if (i % kTileLines == 0) ahead_.advance(std::clamp<int64_t>(count - i, 0, kTileLines) * shape_.kv.row_bytes);
        }
    }

    char* key_panel(int64_t index) const { return keys_packed_ + index * kTileKeys * dim_ * 2; }

    const Item& item_;
    const Shape& shape_;
    const Pages pages_;
    const int64_t head_dim_, dim_, rows_, first_position_, end_;
    const bool is_few_;
    const int64_t at_once_, tile_rows_;  // rows of a tile or a pair of them; rows, filled up to as many
    std::vector<Head> heads_;
    float *key_rows_, *value_rows_;           // for `ChunkRows`
    char* keys_packed_;                       // panels; few rows: tiles of keys that are not whole where they lie
    char* values_packed_;                     // panels of a partition; few rows: of a chunk
    float* turned_;                           // few rows: scores of a chunk [kTileKeys, 16]
    ChunkRows<bf16> keys_, values_;
    Ahead ahead_;
};

}  // namespace baton

// Rows of keys or values of one KV head in a chunk of positions: where they lie, whatever blocks these are in, and how tiles
// may read them.
#pragma once

#include "attention_pages.h"
#include "attention_quarters.h"
#include "attention_tiles.h"
#include "threads.h"

namespace baton {

template <typename Kv>
class ChunkRows {
public:
    // Tiles take `dim` elements of a row, of which those past head_dim are 0. `memory`: num_floats(dim) of it.
    ChunkRows(const Pages& pages, const Item& item, int64_t dim, float* memory)
        : pages_(pages), kv_(pages.shape.kv), first_byte_(item.first_head * kv_.row_bytes), dim_(dim),
          row_bytes_(row_floats(dim) * 4), zeros_(reinterpret_cast<char*>(memory)), staged_(zeros_ + row_bytes_),
          wide_(staged_ + kWidth * row_bytes_) {
        std::memset(zeros_, 0, size_t(row_bytes_));
        std::fill(factors_, factors_ + kPartition, pages.shape.scale);
    }

    static int64_t num_floats(int64_t dim) { return (2 * kWidth + 1) * row_floats(dim); }

    // The chunk at `position`, of the item's first head; rows that fill up the last group are zeros.
    void locate(int64_t position, int64_t count, int64_t which) {
        const int64_t stride = kv_.token_bytes();
        for (int64_t j = 0; j < count;) {
            const int64_t run = pages_.run_length(position + j, position + count);
            const char* row = pages_.token(position + j, which) + first_byte_;
            for (const int64_t run_end = j + run; j < run_end; ++j, row += stride) addresses_[j] = row;
        }
        for (int64_t j = count; j % kGroup != 0; ++j) addresses_[j] = zeros_;
    }

    void next_head(int64_t count) {
        for (int64_t j = 0; j < count; ++j) addresses_[j] += kv_.row_bytes;
    }

    const char* const* from(int64_t j) const { return addresses_ + j; }

    // What a row is multiplied by: `factor`, and in int8 its own scale; of rows that are not there 0.
    void load_scales(int64_t count, float factor) {
        for (int64_t j = 0; j < count; ++j) {
            std::memcpy(&factors_[j], addresses_[j] + kv_.head_dim, sizeof factors_[j]);
            factors_[j] *= factor;
        }
        std::fill(factors_ + count, factors_ + kPartition, 0.0f);
    }
    const float* factors() const { return factors_; }

    bool scales_are_numbers() const {
        Vec sum = {};
        for (int64_t j = 0; j < kPartition; j += kWidth) sum += load(factors_ + j) * 0.0f;
        return sum_lanes(sum) == 0.0f;
    }

    // `count` rows from j on, kWidth at most, that may be read to `dim`: where they lie, if that does not go past their ends.
    const char* const* whole(int64_t j, int64_t count) {
        if (kv_.head_dim == dim_) return from(j);
        for (int64_t i = 0; i < count; ++i) {
            char* const row = staged_ + i * row_bytes_;
            std::memset(row, 0, size_t(row_bytes_));
            std::memcpy(row, addresses_[j + i], size_t(kv_.head_dim) * sizeof(Kv));
            staged_rows_[i] = row;
        }
        return staged_rows_;
    }

    // kWidth rows from j on, elements as 16 bits each.
    const char* const* halved(int64_t j) {
        const char* const* rows = whole(j, kWidth);
        for (int64_t i = 0; i < kWidth; ++i) {
            char* const row = wide_ + i * row_bytes_;
            for (int64_t d = 0; d < dim_; d += kGroup) {
                const Halves some = halves<Kv>(rows[i] + d);
                std::memcpy(row + d * 2, &some, sizeof some);
            }
            staged_rows_[i] = row;
        }
        return staged_rows_;
    }

private:
    static int64_t row_floats(int64_t dim) { return ceil_div(dim * 4 + kScaleBytes, 64) * 16; }

    const Pages& pages_;
    const KvShape& kv_;
    const int64_t first_byte_, dim_, row_bytes_;
    char *const zeros_, *const staged_, *const wide_;  // a row; kWidth rows each
    const char *addresses_[kPartition], *staged_rows_[kWidth];
    alignas(64) float factors_[kPartition];
};

}  // namespace baton

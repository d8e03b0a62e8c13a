// Where a sequence's keys and values lie, and asking memory for them in time.
#pragma once

#include <algorithm>

#include "attention.h"
#include "simd.h"

namespace baton {

constexpr int64_t kAheadBytes = 32 * 1024;  // fewer come too late; with more, a first item waits for what it asks
constexpr int64_t kLine = 64;

// One sequence's keys (`which` 0) and values (1), found through its block table.
struct Pages {
    const char* pool;
    const int32_t* block_table;
    const Shape& shape;

    const char* token(int64_t position, int64_t which) const {
        const int64_t block_size = shape.kv.block_size;
        const int64_t slot = block_table[position / block_size] * block_size + position % block_size;
        return pool + shape.kv.offset(slot, shape.layer, which);
    }
    // Positions from `position` to the end of its block or to `end`.
    int64_t run_length(int64_t position, int64_t end) const {
        return std::min(shape.kv.block_size - position % shape.kv.block_size, end - position);
    }
};

// What an item reads: of the tokens before `end`, the rows of its heads.
struct Reading {
    const int32_t* block_table;
    int64_t first_byte, num_bytes;  // of each token
    int64_t end;
};

// Asks memory for rows some bytes before they are used, in the order of use: blocks lie anywhere, where no hardware
// prefetcher looks. Keys of a partition, its values, the next keys; of each token, the item's heads. Then the first rows
// of the item that comes `then`, if one does: an item that begins has nothing to compute while it waits.
class Ahead {
public:
    Ahead(const Pages& pages, const Reading& own, const Reading* then)
        : pages_(pages), reading_(own), has_then_(then != nullptr) {
        if (has_then_) then_ = *then;
        begin_half();
        advance(kAheadBytes);
    }

    // `bytes` were used.
    void advance(int64_t bytes) {
        for (credit_ += bytes; credit_ >= reading_.num_bytes && start_ < reading_.end; credit_ -= reading_.num_bytes)
            next();
    }

private:
    void next() {
        if (left_ == 0) {
            left_ = pages_.run_length(position_, half_end_);
            token_ = pages_.token(position_, which_) + reading_.first_byte;
            position_ += left_;
        }
        const char* const token_end = token_ + reading_.num_bytes;
        if (asked_ < token_ || asked_ > token_end) asked_ = token_ - reinterpret_cast<uintptr_t>(token_) % kLine;
        for (; asked_ < token_end; asked_ += kLine) prefetch_l2(asked_);
        token_ += pages_.shape.kv.token_bytes();
        if (--left_ == 0 && position_ == half_end_) {
            start_ += which_ == 1 ? kPartition : 0;
            which_ = 1 - which_;
            if (start_ >= reading_.end && has_then_) {
                reading_ = then_, pages_.block_table = then_.block_table;
                start_ = 0, has_then_ = false;
            }
            if (start_ < reading_.end) begin_half();
        }
    }

    void begin_half() {
        position_ = start_;
        half_end_ = std::min(start_ + kPartition, reading_.end);
    }

    Pages pages_;
    Reading reading_, then_{};
    bool has_then_;
    int64_t start_ = 0, which_ = 0, position_ = 0, half_end_ = 0;  // of the partition; in its keys or values
    int64_t left_ = 0, credit_ = 0;                                // tokens of the run; bytes used, not yet asked for
    const char *token_ = nullptr, *asked_ = nullptr;
};

}  // namespace baton

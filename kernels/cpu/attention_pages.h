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
        const Place place = at(position);
        return pool + shape.kv.offset(block_table[place.block], place.within, shape.layer, which);
    }
    // Positions from `position` to the end of its block or to `end`.
    int64_t run_length(int64_t position, int64_t end) const {
        return std::min(shape.kv.block_size - at(position).within, end - position);
    }

private:
    struct Place {
        int64_t block, within;
    };
    Place at(int64_t position) const {
        const uint32_t size = uint32_t(shape.kv.block_size), some = uint32_t(position);  // divided sooner
        return {some / size, some % size};
    }
};

// What an item reads: of the tokens before `end`, the rows of its heads.
struct Reading {
    const int32_t* block_table;
    int64_t first_byte, num_bytes;  // of each token
    int64_t end;
};

inline Reading reading_of(const Item& item, const Shape& shape, const int32_t* block_table, int64_t end) {
    return {block_table, item.first_head * shape.kv.row_bytes, item.num_heads * shape.kv.row_bytes, end};
}

// Asks memory for rows some bytes before they are used, in the order of use: blocks lie anywhere, where no hardware
// prefetcher looks. Keys of a partition, its values, the next keys; of each token, the item's heads. Then the first rows
// of the item that comes `then`, if one does: an item that begins has nothing to compute while it waits.
class Ahead {
public:
    Ahead(const Pages& pages, const Reading& own, const Reading* then)
        : pages_(pages), reading_(own), has_then_(then != nullptr), token_bytes_(pages.shape.kv.token_bytes()) {
        if (has_then_) then_ = *then;
        begin_half();
        advance(kAheadBytes);
    }

    // `bytes` were used.
    void advance(int64_t bytes) {
        while (bytes > 0) {
            if (at_ == span_end_ && !next_span()) return;
            const int64_t some = std::min<int64_t>(bytes, span_end_ - at_);
            ask(at_ + some);
            bytes -= some;
        }
    }

private:
    // What is not asked for yet up to `to`, whole lines.
    void ask(const char* to) {
        const char* line = at_ - reinterpret_cast<uintptr_t>(at_) % kLine;
        if (line == last_line_) line += kLine;
        for (; line < to; line += kLine) prefetch_l2(line);
        last_line_ = line - kLine;
        at_ = to;
    }

    // The next bytes that lie side by side: a run of tokens, if all heads are read, else a token's. False: there are no more.
    bool next_span() {
        if (left_ == 0) {
            if (position_ == half_end_ && !next_half()) return false;
            left_ = pages_.run_length(position_, half_end_);
            token_ = pages_.token(position_, which_) + reading_.first_byte;
            position_ += left_;
        }
        const int64_t tokens = reading_.num_bytes == token_bytes_ ? left_ : 1;
        at_ = token_, span_end_ = token_ + (tokens - 1) * token_bytes_ + reading_.num_bytes;
        token_ += tokens * token_bytes_, left_ -= tokens;
        return true;
    }

    bool next_half() {
        start_ += which_ == 1 ? kPartition : 0;
        which_ = 1 - which_;
        if (start_ >= reading_.end) {
            if (!has_then_) return which_ = 1, start_ -= kPartition, false;  // as before
            reading_ = then_, pages_.block_table = then_.block_table;
            start_ = 0, has_then_ = false;
        }
        begin_half();
        return true;
    }

    void begin_half() {
        position_ = start_;
        half_end_ = std::min(start_ + kPartition, reading_.end);
    }

    Pages pages_;
    Reading reading_, then_{};
    bool has_then_;
    const int64_t token_bytes_;
    int64_t start_ = 0, which_ = 0, position_ = 0, half_end_ = 0;  // of the partition; in its keys or values
    int64_t left_ = 0;                                             // tokens of the run
    const char *token_ = nullptr, *at_ = nullptr, *span_end_ = nullptr, *last_line_ = nullptr;
};

}  // namespace baton

// Keys and values that the next attention reads, asked for while the products before it compute.
//
// Where many rows share a weight, products wait for arithmetic and leave most of the memory's time unused, while
// attention, which meets each key once, waits for memory. So each tile of a product asks for a few lines of what
// attention will read (`Ride`); by then these are in the last cache. It is a hint: no result depends on it.
//
// 1. `KvAhead` lists the stretches of a layer's keys and values that a batch will read, one after the other.
// 2. A product between two attentions asks for a part of that list by its share of their multiply-adds (`KvRide`), each of
//    its panels for an equal part of this, whoever computes it.
// 3. `KvRide::Cursor` walks some panels and gives each tile its lines, of one stretch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kv_rows.h"
#include "threads.h"

namespace baton {

// What a tile asks for beside its panels: a line at each of its first steps over k.
struct Ride {
    static constexpr int64_t kLineBytes = 64;

    const char* at = nullptr;
    int64_t num_lines = 0;

    void ask(int64_t k) const {
        if (k < num_lines) prefetch_l2(at + k * kLineBytes);
    }
};

class KvAhead {
public:
    // Of a layer: more would neither fit the last cache beside the weights nor come in time.
    static constexpr int64_t kMostBytes = int64_t(12) << 20;

    // Of nothing.
    KvAhead() = default;

    // Positions [0, context_lens[s]) of every sequence s, in the blocks block_tables[s * max_blocks ...]; what is too much
    // is left out at the end.
    KvAhead(const KvShape& kv, const char* pool, const int32_t* context_lens, const int32_t* block_tables,
            int64_t max_blocks, int64_t num_seqs)
        : pool_(pool), layer_bytes_(kv.offset(0, 1, 0)) {
        for (int64_t s = 0; s < num_seqs; ++s)
            for (int64_t position = 0; position < context_lens[s]; position += kv.block_size) {
                if (num_bytes() >= kMostBytes) return;
                const int64_t slot = block_tables[s * max_blocks + position / kv.block_size] * kv.block_size;
                const int64_t tokens = std::min<int64_t>(kv.block_size, context_lens[s] - position);
                for (int64_t which = 0; which < 2; ++which)
                    add(kv.offset(slot, 0, which), tokens * kv.token_bytes());
            }
    }

    int64_t num_bytes() const { return ends_.empty() ? 0 : ends_.back(); }

private:
    friend class KvRide;

    void add(int64_t offset, int64_t num_bytes) {
        const int64_t begin = this->num_bytes();
        if (begin > 0 && begins_.back() + begin == offset) {  // goes on where the last one ends
            ends_.back() += num_bytes;
            return;
        }
        begins_.push_back(offset - begin);
        ends_.push_back(begin + num_bytes);
    }

    const char* pool_ = nullptr;
    int64_t layer_bytes_ = 0;
    // Bytes [ends_[i - 1], ends_[i]) of the list lie in the pool's first layer at begins_[i] and as many on.
    std::vector<int64_t> begins_, ends_;
};

// The part of the list that one product asks for.
class KvRide {
public:
    KvRide() = default;

    // [begin, end) of `total` parts of a layer's list, in num_panels equal ones.
    KvRide(const KvAhead& kv, int64_t layer, int64_t begin, int64_t end, int64_t total, int64_t num_panels)
        : kv_(&kv), layer_(kv.pool_ + layer * kv.layer_bytes_), first_(kv.num_bytes() * begin / total),
          num_bytes_(kv.num_bytes() * end / total - first_), num_panels_(num_panels) {}

    // Over panels from `panel` on, each passed by `tiles` tiles.
    class Cursor {
    public:
        Cursor(const KvRide& ride, int64_t panel, int64_t tiles)
            : ride_(ride), num_tiles_(ride.num_panels_ * tiles), tile_(panel * tiles) {
            if (ride_.num_bytes_ == 0) return;
            const std::vector<int64_t>& ends = ride_.kv_->ends_;
            const auto stretch = std::upper_bound(ends.begin(), ends.end(), begin_of(tile_));
            stretch_ = size_t(stretch - ends.begin());
            at_ = settled(begin_of(tile_));
            leave_ended();
        }

        // The next tile's.
        Ride next() {
            ++tile_;
            if (ride_.num_bytes_ == 0 || stretch_ == ride_.kv_->ends_.size()) return {};
            const char* const stretch = ride_.layer_ + ride_.kv_->begins_[stretch_];
            const char* const at = stretch + at_ - reinterpret_cast<uintptr_t>(stretch + at_) % Ride::kLineBytes;
            at_ = settled(begin_of(tile_));
            const Ride result{at, ceil_div(stretch + at_ - at, Ride::kLineBytes)};
            leave_ended();
            return result;
        }

    private:
        int64_t begin_of(int64_t tile) const {
            return (ride_.first_ + ride_.num_bytes_ * tile / num_tiles_) / Ride::kLineBytes * Ride::kLineBytes;
        }

        // A tile ends with its stretch if it would end after it, or less than half a tile before.
        int64_t settled(int64_t end) const {
            const int64_t half = ride_.num_bytes_ / num_tiles_ / 2, last = ride_.kv_->ends_[stretch_];
            return end > last - half ? last : end;
        }

        void leave_ended() { stretch_ += at_ == ride_.kv_->ends_[stretch_]; }

        const KvRide& ride_;
        const int64_t num_tiles_;
        int64_t tile_, at_ = 0;  // `at_` in the list
        size_t stretch_ = 0;     // where it lies
    };

private:
    const KvAhead* kv_ = nullptr;
    const char* layer_ = nullptr;
    int64_t first_ = 0, num_bytes_ = 0, num_panels_ = 1;
};

}  // namespace baton

// What products would ask for, listed: every line that any tile of `pieces` of a product's panels asks for.
#include "kv_ahead.h"

using namespace baton;

extern "C" {

int64_t list_most_bytes() { return KvAhead::kMostBytes; }

// Asks of panels [piece_ends[i - 1], piece_ends[i]) for each i, in `tiles` tiles a panel, as bytes from the pool's start
// and lines. Returns their number.
int64_t list_asked(const int32_t* context_lens, const int32_t* block_tables, int64_t max_blocks, int64_t num_seqs,
                   int64_t block_size, int64_t token_bytes, int64_t num_layers, int64_t layer, const int64_t* shares,
                   int64_t num_pieces, const int64_t* piece_ends, int64_t tiles, char* pool, int64_t* at,
                   int64_t* num_lines) {
    const KvShape kv(num_layers, block_size, 1, token_bytes / 2, false, true);
    const KvAhead ahead(kv, pool, context_lens, block_tables, max_blocks, num_seqs);
    const KvRide ride(ahead, layer, shares[0], shares[1], shares[2], piece_ends[num_pieces - 1]);
    int64_t count = 0;
    for (int64_t i = 0; i < num_pieces; ++i) {
        const int64_t begin = i > 0 ? piece_ends[i - 1] : 0;
        KvRide::Cursor cursor(ride, begin, tiles);
        for (int64_t tile = begin * tiles; tile < piece_ends[i] * tiles; ++tile, ++count) {
            const Ride asked = cursor.next();
            at[count] = asked.num_lines > 0 ? asked.at - pool : 0;
            num_lines[count] = asked.num_lines;
        }
    }
    return count;
}
}

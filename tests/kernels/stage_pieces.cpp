// The lengths of pieces that `Stage` is offered.
#include "stage.h"

extern "C" int64_t stage_even_piece(int64_t length, int64_t shortest, int64_t num_threads) {
    return baton::even_piece(length, shortest, num_threads);
}

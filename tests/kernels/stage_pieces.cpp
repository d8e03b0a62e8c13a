// The lengths of pieces that `Stage` is offered, and in which order they are taken.
#include "stage.h"

extern "C" int64_t stage_even_piece(int64_t length, int64_t shortest, int64_t num_threads) {
    return baton::even_piece(length, shortest, num_threads);
}

// [0, length) by one thread: `helped` pieces from the back, then the rest from the front. `taken` gets begin, end and next of
// each; returns how many.
extern "C" int64_t stage_taken(int64_t length, int64_t piece, int64_t helped, int64_t* taken) {
    baton::Stage stage;
    int64_t count = 0;
    const auto body = [&](int64_t begin, int64_t end, int64_t next) {
        const int64_t values[] = {begin, end, next};
        for (int64_t value : values) taken[count++] = value;
    };
    stage.offer(0, length, piece, body);
    for (int64_t i = 0; i < helped; ++i) stage.help();
    stage.work();
    stage.settle();
    return count / 3;
}

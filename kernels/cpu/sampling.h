// What the sampler is asked in a step.
#pragma once
#include "processors.h"

namespace baton {

struct Request {          // fields of 8 bytes, as `native_sampling.py` writes them
    const float* logits;  // [num_rows, size], rows `stride` apart
    int64_t stride, size, num_rows;
    const int64_t* best;  // [num_rows]: the first largest logit of a row, or its first NaN
    const float* maxima;  // [num_rows, blocks of size]: the largest of each block; null if they are not known
    const Rule* const* rules;
    const Progress* progress;
    const int64_t* positions;  // [num_rows]: of the tokens to choose
    int64_t* tokens;           // [num_rows]
    float* logprobs;           // [num_rows]: of the tokens, where asked
    int64_t num_top;           // the most any rule asks for
    int64_t* top_ids;          // [num_rows, num_top]
    float* top_logprobs;       // [num_rows, num_top]
};

}  // namespace baton

// The step after a step in one call, where every row brings the token that it has just got.
//
// 1. `baton_forward` and `baton_sample` have computed a step by the same fields: each of its rows was a token of a sequence
//    of its own, and all were sampled. Neither the fields nor what they point to has changed since, but for results.
// 2. The batch moves on in the caller's memory: tokens are those that were chosen; positions, slots and context lengths
//    are those of the next place.
// 3. The pass reads that memory again, then the sampler.
//
// Caches are full of weights when a step ends. What happens here touches a few of the caller's lines; the caller's own
// functions, called one by one, would touch a thousand.
#include <cstring>

#include "forward_model.h"
#include "sampling.h"

extern "C" {
int64_t baton_forward(void* model, const void* fields, int64_t* index);
int64_t baton_sample(void* sampler, const void* fields);
}

namespace baton {
namespace {

struct StepOn {  // fields of 8 bytes, as `native_steps.py` writes them
    void* model;
    const void* batch;  // fields of Batch
    void* sampler;
    const void* request;  // fields of Request
    int64_t* index;       // where a fault is
};

// The caller owns this memory, though those who compute only read it.
template <typename T>
T* own(const T* values) {
    return const_cast<T*>(values);
}

// The first row that is past its block table; nothing is written then. -1: all have moved.
int64_t move_on(const Batch& batch, const Request& request) {
    const int64_t size = batch.block_size, count = batch.num_tokens;
    for (int64_t row = 0; row < count; ++row)
        if (batch.positions[row] + 1 >= batch.max_blocks * size) return row;
    int64_t *tokens = own(batch.tokens), *positions = own(batch.positions), *slots = own(batch.slots);
    int64_t* next_positions = own(request.positions);
    int32_t* context_lens = own(batch.context_lens);
    for (int64_t row = 0; row < count; ++row) {
        const int64_t position = ++positions[row];
        tokens[row] = request.tokens[row];
        slots[row] = batch.block_tables[row * batch.max_blocks + position / size] * size + position % size;
        next_positions[row] = position + 1;
        context_lens[row] = int32_t(position + 1);
    }
    return -1;
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

// One caller at a time. Returns how many rows had a NaN or +infinity, or a Fault, negated, whose place in its array is in
// `index`.
int64_t baton_step_on(const void* fields) {
    StepOn step;
    Batch batch;
    Request request;
    std::memcpy(&step, fields, sizeof step);
    std::memcpy(&batch, step.batch, sizeof batch);
    std::memcpy(&request, step.request, sizeof request);
    *step.index = move_on(batch, request);
    if (*step.index >= 0) return -int64_t(Fault::kSequence);
    const int64_t fault = baton_forward(step.model, step.batch, step.index);
    if (fault) return -fault;
    const int64_t num_broken = baton_sample(step.sampler, step.request);
    if (num_broken >= 0) return num_broken;
    *step.index = -1 - num_broken;
    return -int64_t(Fault::kBest);
}
}

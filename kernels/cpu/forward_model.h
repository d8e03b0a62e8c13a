// The model and the batch of a forward pass (`forward.cpp`), as its caller describes them, and whether they fit together.
#pragma once

#include "attention.h"
#include "team.h"

namespace baton {

// As `native_forward.py` lists them; matrices are packed, null means there is none.
struct Layer {
    const void *input_norm, *qkv, *q_norm, *k_norm, *output, *mlp_norm, *gate_up, *down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
};
static_assert(sizeof(Layer) == 12 * sizeof(void*));

struct Sizes {
    int64_t num_layers, hidden, inner, num_heads, num_kv_heads, head_dim, vocab, max_positions, is_bf16, by_tiles;

    int64_t query() const { return num_heads * head_dim; }
    int64_t kv() const { return num_kv_heads * head_dim; }
    int64_t qkv() const { return query() + 2 * kv(); }
    // Weights that a row meets between two attentions.
    int64_t num_between() const { return hidden * (query() + 3 * inner + qkv()); }
};

struct Batch {  // fields of 8 bytes, as `native_forward.py` writes them
    int64_t num_tokens, num_seqs, max_blocks, num_logit_rows;
    const int64_t *tokens, *positions, *slots, *logit_rows;
    const int32_t *query_starts, *context_lens, *block_tables;
    void* pool;
    int64_t num_blocks, block_size, kv_int8;
    int64_t keep_hidden;  // 0: `hidden` ends as work memory
    void* hidden;    // [num_tokens, hidden] of the model's type
    float* logits;   // [num_logit_rows, vocab]
    int64_t* best;   // [num_logit_rows]
    float* maxima;   // [num_logit_rows, blocks of vocab]

    // Rows end before the last layer does.
    bool is_trimmed() const { return !keep_hidden && num_logit_rows < num_tokens; }
};

enum class Fault : int64_t { kNone, kToken, kPosition, kSlot, kSequence, kLogitRow, kLogitOrder, kBest };

class Model {
public:
    Model(const Sizes& sizes, const Layer* layers, const void* embedding, const void* final_norm, const void* lm_head,
          const float* cos, const float* sin, float eps, float scale, int64_t num_threads)
        : sizes(sizes), layers(layers, layers + sizes.num_layers), embedding(embedding), final_norm(final_norm),
          lm_head(lm_head), cos(cos), sin(sin), eps(eps), scale(scale),
          team(num_threads, num_threads > kMostHelped ? 0 : num_threads - 1) {}

    // Few threads are one rank and its helpers in a short step: whoever loses its core to another process then holds up
    // no more than the piece it has taken, while a rank is waited for. Longer steps gain more by sharing all work.
    static constexpr int64_t kMostHelped = 4, kMostHelpedTokens = 64;

    const Sizes sizes;
    const std::vector<Layer> layers;
    const void *const embedding, *const final_norm, *const lm_head;
    const float *const cos, *const sin;
    const float eps, scale;
    Team team;
    Scratch rows_memory, inner_memory, wide_memory, query_memory, operand_memory, placed_memory;
    double* profile = nullptr;  // seconds [ranks, stages, 2], see `Stopwatch`
};

inline int64_t first_outside(const int64_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < 0 || values[i] >= limit) return i;
    return -1;
}

inline Fault check(const Model& model, const Batch& batch, int64_t* index) {
    const auto outside = [&](const int64_t* values, int64_t count, int64_t limit) {
        return (*index = first_outside(values, count, limit)) >= 0;
    };
    if (outside(batch.tokens, batch.num_tokens, model.sizes.vocab)) return Fault::kToken;
    if (outside(batch.positions, batch.num_tokens, model.sizes.max_positions)) return Fault::kPosition;
    if (outside(batch.slots, batch.num_tokens, batch.num_blocks * batch.block_size)) return Fault::kSlot;
    if (outside(batch.logit_rows, batch.num_logit_rows, batch.num_tokens)) return Fault::kLogitRow;
    for (*index = 1; batch.is_trimmed() && *index < batch.num_logit_rows; ++*index)
        if (batch.logit_rows[*index - 1] >= batch.logit_rows[*index]) return Fault::kLogitOrder;
    *index = first_unfit(batch.query_starts, batch.context_lens, batch.block_tables, batch.max_blocks, batch.num_seqs,
                         batch.num_tokens, batch.num_blocks, batch.block_size);
    return *index >= 0 ? Fault::kSequence : Fault::kNone;
}

}  // namespace baton

// A whole forward pass over a packed batch in one call: every layer, then logits of the rows that ask.
//
// 1. The caller describes the model once (`baton_model_create`): sizes, and pointers to weights that it keeps alive.
// 2. `baton_forward` checks every index of the batch, sizes its work memory, and wakes the team of threads.
// 3. The threads walk the layers together. Products split their panels over threads, the same share in every step,
//    so a core streams the same weights each time; row-wise work splits rows, columns or heads; attention's items are
//    handed out one by one. A barrier stands wherever one thread reads what another wrote.
// 4. The largest logit of each row is found while the row is still in cache.
//
// Every element goes through the operations of `gemm.h`, `rowwise.h` and `attention.h` in the order, and with the
// roundings to the model's type, of the operations called one by one: results are equal bit for bit.
#include <algorithm>

#include "attention.h"
#include "gemm.h"
#include "rowwise.h"
#include "team.h"

namespace baton {
namespace {

// As `native_forward.py` lists them; matrices are packed, null means there is none.
struct Layer {
    const void *input_norm, *qkv, *q_norm, *k_norm, *output, *mlp_norm, *gate_up, *down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
};
static_assert(sizeof(Layer) == 12 * sizeof(void*));

struct Sizes {
    int64_t num_layers, hidden, inner, num_heads, num_kv_heads, head_dim, vocab, max_positions, is_bf16;

    int64_t query() const { return num_heads * head_dim; }
    int64_t kv() const { return num_kv_heads * head_dim; }
    int64_t qkv() const { return query() + 2 * kv(); }
};

struct Batch {
    int64_t num_tokens, num_seqs, max_blocks, num_logit_rows;
    const int64_t *tokens, *positions, *slots, *logit_rows;
    const int32_t *query_starts, *context_lens, *block_tables;
    void* pool;
    int64_t num_blocks, block_size, kv_int8;
    void* hidden;    // [num_tokens, hidden] of the model's type
    float* logits;   // [num_logit_rows, vocab]
    int64_t* best;   // [num_logit_rows]
};

enum class Fault : int64_t { kNone, kToken, kPosition, kSlot, kSequence, kLogitRow };

class Model {
public:
    Model(const Sizes& sizes, const Layer* layers, const void* embedding, const void* final_norm, const void* lm_head,
          const float* cos, const float* sin, float eps, float scale, int64_t num_threads)
        : sizes(sizes), layers(layers, layers + sizes.num_layers), embedding(embedding), final_norm(final_norm),
          lm_head(lm_head), cos(cos), sin(sin), eps(eps), scale(scale), team(num_threads),
          next_items(size_t(sizes.num_layers)) {}

    const Sizes sizes;
    const std::vector<Layer> layers;
    const void *const embedding, *const final_norm, *const lm_head;
    const float *const cos, *const sin;
    const float eps, scale;
    Team team;
    std::vector<std::atomic<int64_t>> next_items;  // attention's, per layer
    Scratch rows_memory, wide_memory, query_memory;
};

int64_t first_outside(const int64_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < 0 || values[i] >= limit) return i;
    return -1;
}

// [begin, end) of rank's share of `count`, in steps of `unit`.
struct Share {
    int64_t begin, end;

    Share(int64_t count, int64_t rank, int64_t size, int64_t unit = 1) {
        const int64_t units = ceil_div(count, unit);
        begin = std::min(count, units * rank / size * unit);
        end = std::min(count, units * (rank + 1) / size * unit);
    }
};

// The index of the largest value, the first among equals; of the first NaN, if there is one.
int64_t argmax(const float* values, int64_t count) {
    Vec highest = splat(-kInfinity);
    IntVec not_numbers = {};
    for (int64_t i = 0; i < count; i += kWidth) {
        // the last vector goes over some values again, or is filled up with the first
        Vec value = splat(values[0]);
        if (count >= kWidth)
            value = load(values + std::min(i, count - kWidth));
        else
            for (int64_t lane = 0; lane < count; ++lane) value[lane] = values[lane];
        highest = max(highest, value);
        not_numbers |= value != value;
    }
    bool has_nan = false;
    for (int64_t lane = 0; lane < kWidth; ++lane) has_nan |= not_numbers[lane] != 0;
    const float best = max_lanes(highest);
    for (int64_t i = 0; i < count; ++i)
        if (has_nan ? values[i] != values[i] : values[i] == best) return i;
    return 0;
}

template <typename T>
class Pass {
public:
    Pass(Model& model, const Batch& batch)
        : model_(model), s_(model.sizes), batch_(batch), size_(model.team.size()),
          x_(static_cast<T*>(batch.hidden)), pool_(static_cast<char*>(batch.pool)),
          shape_(KvShape(s_.num_layers, batch.block_size, s_.num_kv_heads, s_.head_dim, batch.kv_int8, sizeof(T) == 2),
                 s_.num_heads, model.scale),
          items_(cut(shape_, batch.query_starts, batch.num_seqs, size_)) {
        const int64_t rows = std::max(batch.num_tokens, batch.num_logit_rows);
        a_ = model.rows_memory.floats(rows * std::max({s_.hidden, s_.query(), s_.inner}));
        wide_ = typed(model.wide_memory, rows * std::max(s_.qkv(), 2 * s_.inner));
        q_ = typed(model.query_memory, rows * s_.query());
        for (std::atomic<int64_t>& next : model.next_items) next.store(0, std::memory_order_relaxed);
    }

    void run(int64_t rank) {
        const Share rows(batch_.num_tokens, rank, size_);
        const T* embedding = static_cast<const T*>(model_.embedding);
        for (int64_t m = rows.begin; m < rows.end; ++m)
            std::memcpy(x_ + m * s_.hidden, embedding + batch_.tokens[m] * s_.hidden, size_t(s_.hidden) * sizeof(T));
        for (int64_t index = 0; index < s_.num_layers; ++index) {
            const Layer& layer = model_.layers[size_t(index)];
            norm(rows, layer.input_norm);
            model_.team.barrier();
            product(rank, layer.qkv, s_.hidden, Store<T>{wide_, layer.qkv_bias, s_.qkv()});
            model_.team.barrier();
            heads(Share(batch_.num_tokens * (s_.num_heads + 2 * s_.num_kv_heads), rank, size_), layer, index);
            model_.team.barrier();
            attention(index);
            model_.team.barrier();
            product(rank, layer.output, s_.query(), AddTo<T>{x_, layer.output_bias, s_.hidden});
            model_.team.barrier();
            norm(rows, layer.mlp_norm);
            model_.team.barrier();
            product(rank, layer.gate_up, s_.hidden, Store<T>{wide_, layer.gate_up_bias, 2 * s_.inner});
            model_.team.barrier();
            gate(Share(s_.inner, rank, size_, 16 * kWidth));
            model_.team.barrier();
            product(rank, layer.down, s_.inner, AddTo<T>{x_, layer.down_bias, s_.hidden});
            model_.team.barrier();
        }
        logits(rank);
    }

private:
    static T* typed(Scratch& scratch, int64_t count) {
        return reinterpret_cast<T*>(scratch.floats(ceil_div(count * int64_t(sizeof(T)), 4)));
    }

    void norm(const Share& rows, const void* weight) {
        for (int64_t m = rows.begin; m < rows.end; ++m)
            rms_norm_row(x_ + m * s_.hidden, static_cast<const T*>(weight), model_.eps, s_.hidden, a_ + m * s_.hidden);
    }

    template <typename Output>
    void product(int64_t rank, const void* packed, int64_t in_features, const Output& output) {
        multiply(rank, packed, batch_.num_tokens, in_features, output);
    }

    template <typename Output>
    void multiply(int64_t rank, const void* packed, int64_t num_rows, int64_t in_features, const Output& output) {
        const T* panels = reinterpret_cast<const T*>(static_cast<const char*>(packed) + sizeof(PackedHeader));
        const Share share(ceil_div(output.out_features, kPanel), rank, size_);
        gemm(a_, num_rows, in_features, panels, share.begin, share.end, output);
    }

    // Query and key heads are normed and rotated; queries are kept, keys and values go to the pool.
    void heads(const Share& share, const Layer& layer, int64_t index) {
        const int64_t per_row = s_.num_heads + 2 * s_.num_kv_heads, dim = s_.head_dim;
        const KvShape& kv = shape_.kv;
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int64_t m = i / per_row, part = i % per_row;
            T* source = wide_ + m * s_.qkv() + part * dim;
            if (part < s_.num_heads) {
                rotate(source, layer.q_norm, m, q_ + m * s_.query() + part * dim);
                continue;
            }
            const int64_t head = part - s_.num_heads, which = head / s_.num_kv_heads;
            if (which == 0) rotate(source, layer.k_norm, m, source);
            const int64_t place = kv.offset(batch_.slots[m], index, which) + head % s_.num_kv_heads * kv.row_bytes;
            write_row(source, kv, pool_ + place);
        }
    }

    void rotate(T* source, const void* weight, int64_t m, T* target) {
        const int64_t dim = s_.head_dim, row = batch_.positions[m] * (dim / 2);
        if (weight != nullptr) rms_norm_row(source, static_cast<const T*>(weight), model_.eps, dim, source);
        rotate_head(source, model_.cos + row, model_.sin + row, dim, target);
    }

    void attention(int64_t index) {
        Shape shape = shape_;
        shape.layer = index;
        Team::share(model_.next_items[size_t(index)], int64_t(items_.size()), [&](int64_t item) {
            attend(items_[size_t(item)], shape, q_, s_.query(), pool_, batch_.query_starts, batch_.context_lens,
                   batch_.block_tables, batch_.max_blocks, a_);
        });
    }

    void gate(const Share& columns) {
        for (int64_t m = 0; m < batch_.num_tokens; ++m) {
            const T* gates = wide_ + m * 2 * s_.inner + columns.begin;
            silu_mul_row(gates, gates + s_.inner, columns.end - columns.begin, a_ + m * s_.inner + columns.begin);
        }
    }

    void logits(int64_t rank) {
        if (batch_.num_logit_rows == 0) return;
        const Share rows(batch_.num_logit_rows, rank, size_);
        for (int64_t r = rows.begin; r < rows.end; ++r)
            rms_norm_row(x_ + batch_.logit_rows[r] * s_.hidden, static_cast<const T*>(model_.final_norm), model_.eps,
                         s_.hidden, a_ + r * s_.hidden);
        model_.team.barrier();
        multiply(rank, model_.lm_head, batch_.num_logit_rows, s_.hidden, Store<float>{batch_.logits, nullptr, s_.vocab});
        model_.team.barrier();
        for (int64_t r = rows.begin; r < rows.end; ++r)
            batch_.best[r] = argmax(batch_.logits + r * s_.vocab, s_.vocab);
    }

    Model& model_;
    const Sizes& s_;
    const Batch& batch_;
    const int64_t size_;
    T *x_, *wide_, *q_;  // wide_: [rows, qkv] or [rows, gate and up]; q_: [rows, heads, head_dim]
    float* a_;                   // [rows, in features]: what the next product reads
    char* pool_;
    const Shape shape_;
    const std::vector<Item> items_;
};

Fault check(const Model& model, const Batch& batch, int64_t* index) {
    const auto outside = [&](const int64_t* values, int64_t count, int64_t limit) {
        return (*index = first_outside(values, count, limit)) >= 0;
    };
    if (outside(batch.tokens, batch.num_tokens, model.sizes.vocab)) return Fault::kToken;
    if (outside(batch.positions, batch.num_tokens, model.sizes.max_positions)) return Fault::kPosition;
    if (outside(batch.slots, batch.num_tokens, batch.num_blocks * batch.block_size)) return Fault::kSlot;
    if (outside(batch.logit_rows, batch.num_logit_rows, batch.num_tokens)) return Fault::kLogitRow;
    *index = first_unfit(batch.query_starts, batch.context_lens, batch.block_tables, batch.max_blocks, batch.num_seqs,
                         batch.num_tokens, batch.num_blocks, batch.block_size);
    return *index >= 0 ? Fault::kSequence : Fault::kNone;
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

// `sizes` as the fields of Sizes, `layers` as num_layers times those of Layer. Null if no thread can be started.
void* baton_model_create(const int64_t* sizes, const void* const* layers, const void* embedding,
                         const void* final_norm, const void* lm_head, const float* cos, const float* sin, float eps,
                         float scale, int64_t num_threads) {
    Sizes values;
    std::memcpy(&values, sizes, sizeof values);
    try {
        return new Model(values, reinterpret_cast<const Layer*>(layers), embedding, final_norm, lm_head, cos, sin, eps,
                         scale, num_threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void baton_model_destroy(void* model) { delete static_cast<Model*>(model); }

// One step; one caller at a time. Returns a Fault, whose place in its array is in *index; nothing is written then.
int64_t baton_forward(void* model, int64_t num_tokens, int64_t num_seqs, int64_t max_blocks, int64_t num_logit_rows,
                      const int64_t* tokens, const int64_t* positions, const int64_t* slots, const int64_t* logit_rows,
                      const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables,
                      void* pool, int64_t num_blocks, int64_t block_size, int64_t kv_int8, void* hidden, float* logits,
                      int64_t* best, int64_t* index) {
    Model& m = *static_cast<Model*>(model);
    const Batch batch{num_tokens, num_seqs, max_blocks, num_logit_rows, tokens,     positions, slots,  logit_rows, query_starts,
                      context_lens, block_tables, pool, num_blocks, block_size, kv_int8, hidden, logits, best};
    const Fault fault = check(m, batch, index);
    if (fault != Fault::kNone) return int64_t(fault);
    if (m.sizes.is_bf16) {
        Pass<bf16> pass(m, batch);
        m.team.run([&](int64_t rank) { pass.run(rank); });
    } else {
        Pass<float> pass(m, batch);
        m.team.run([&](int64_t rank) { pass.run(rank); });
    }
    return int64_t(Fault::kNone);
}
}

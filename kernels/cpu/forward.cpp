// A whole forward pass over a packed batch in one call: every layer, then logits of the rows that ask.
//
// 1. The caller describes the model once (`baton_model_create`): sizes, and pointers to weights that it keeps alive.
// 2. `baton_forward` checks every index of the batch, sizes its work memory, and wakes the team of threads.
// 3. The ranks of the team walk the layers together; few threads are one rank and its helpers (`Model::kMostHelped`).
//    Products split their panels over ranks, the same share in every step, so a core streams the same weights each
//    time; row-wise work splits rows, columns or heads; attention splits items. Who is done takes pieces from who is
//    not. A barrier stands wherever one rank reads what another wrote: few rows are normed by every rank for itself,
//    and gates meet the ups of their columns where these are multiplied.
// 4. Past the last layer's keys and values nobody reads a row but for its logits: from there on only rows that ask for
//    logits are computed, unless the caller wants all hidden states.
// 5. The largest logit of each row, and of each block of it, is found while the row is still in cache.
//
// Every element goes through the operations of `gemm.h`, `rowwise.h` and `attention.h` in the order, and with the
// roundings to the model's type, of the operations called one by one: results are equal bit for bit.
#include <algorithm>

#include "forward_model.h"
#include "gated.h"
#include "kv_ahead.h"
#include "operand.h"
#include "rowwise.h"
#include "selection.h"
#include "stopwatch.h"

namespace baton {
namespace {

template <typename T>
class Pass {
public:
    Pass(Model& model, const Batch& batch)
        : model_(model), s_(model.sizes), batch_(batch), size_(model.team.size()),
          x_(static_cast<T*>(batch.hidden)), pool_(static_cast<char*>(batch.pool)),
          shape_(shape_of(model, batch)),
          items_(cut(shape_, batch.query_starts, batch.num_seqs, model.team.most())),
          last_items_(batch.is_trimmed() ? asked(items_, batch) : items_), kv_ahead_(kv_to_come()),
          operands_(model.team, model.operand_memory, model.placed_memory, std::max(batch.num_tokens, batch.num_logit_rows),
                    std::max({s_.hidden, s_.query(), s_.inner})) {
        const int64_t rows = std::max(batch.num_tokens, batch.num_logit_rows);
        a_ = model.rows_memory.floats(rows * std::max(s_.hidden, s_.query()));
        inner_ = model.inner_memory.floats(batch.num_tokens * s_.inner);
        wide_ = typed(model.wide_memory, rows * std::max(s_.qkv(), 2 * s_.inner));
        q_ = typed(model.query_memory, rows * s_.query());
    }

    void run(int64_t rank) {
        Stopwatch watch(model_.profile, rank);
        const Share rows(batch_.num_tokens, rank, size_);
        const T* embedding = static_cast<const T*>(model_.embedding);
        for (int64_t m = rows.begin; m < rows.end; ++m)
            std::memcpy(x_ + m * s_.hidden, embedding + batch_.tokens[m] * s_.hidden, size_t(s_.hidden) * sizeof(T));
        if (batch_.num_tokens <= kOwnRows) meet(rank, watch, StepStage::kEmbedding);
        int64_t num_rows = batch_.num_tokens;
        for (int64_t index = 0; index < s_.num_layers; ++index) {
            const Layer& layer = model_.layers[size_t(index)];
            if (rank == 0) model_.team.recruit(index == 0);
            Operand normed = norm(watch, rank, layer.input_norm, layer.qkv, num_rows);
            normed.ride = ride(index, layer.qkv, s_.num_between() - s_.qkv() * s_.hidden);
            product(rank, normed, layer.qkv, Store<T>{wide_, layer.qkv_bias, s_.qkv()});
            meet(rank, watch, StepStage::kQkv);
            heads(rank, Share(batch_.num_tokens * (s_.num_heads + 2 * s_.num_kv_heads), rank, size_), layer, index);
            meet(rank, watch, StepStage::kHeads);
            const bool is_last = index == s_.num_layers - 1;
            attention(rank, index, is_last ? last_items_ : items_);
            meet(rank, watch, StepStage::kAttention);
            if (is_last && batch_.is_trimmed()) {
                if (batch_.num_logit_rows == 0) return;
                num_rows = batch_.num_logit_rows;
                if (rank == 0) keep_asked();
                meet(rank, watch, StepStage::kAttention);
            }
            Operand attended = operands_.prepare(rank, a_, layer.output, num_rows, s_.query());
            attended.ride = ride(index + 1, layer.output, 0);
            product(rank, attended, layer.output, AddTo<T>{x_, layer.output_bias, s_.hidden});
            meet(rank, watch, StepStage::kOutput);
            normed = norm(watch, rank, layer.mlp_norm, layer.gate_up, num_rows);
            normed.ride = ride(index + 1, layer.gate_up, s_.hidden * s_.query());
            Operand inner = gated(watch, rank, normed, layer);
            inner.ride = ride(index + 1, layer.down, s_.hidden * (s_.query() + 2 * s_.inner));
            product(rank, inner, layer.down, AddTo<T>{x_, layer.down_bias, s_.hidden});
            meet(rank, watch, StepStage::kDown);
        }
        logits(watch, rank);
    }

private:
    static T* typed(Scratch& scratch, int64_t count) {
        return reinterpret_cast<T*>(scratch.floats(ceil_div(count * int64_t(sizeof(T)), 4)));
    }

    static Shape shape_of(const Model& model, const Batch& batch) {
        const Sizes& s = model.sizes;
        const KvShape kv(s.num_layers, batch.block_size, s.num_kv_heads, s.head_dim, batch.kv_int8, sizeof(T) == 2);
        Shape shape(kv, s.num_heads, model.scale);
        shape.by_tiles = s.by_tiles != 0;
        return shape;
    }

    // The end of a stage whose results other ranks read.
    void meet(int64_t rank, Stopwatch& watch, StepStage stage) {
        watch.lap(stage);
        model_.team.barrier(rank);
        watch.lap(stage, Stopwatch::kWait);
    }

    // Items with a row that asks for logits.
    static std::vector<Item> asked(const std::vector<Item>& items, const Batch& batch) {
        std::vector<Item> result;
        const int64_t* end = batch.logit_rows + batch.num_logit_rows;
        for (const Item& item : items) {
            const int64_t* row = std::lower_bound(batch.logit_rows, end, item.first_query);
            if (row != end && *row < item.first_query + item.num_queries) result.push_back(item);
        }
        return result;
    }

    // What the rest of the pass reads of the rows that ask for logits, moved to the front; they ascend.
    void keep_asked() {
        for (int64_t r = 0; r < batch_.num_logit_rows; ++r) {
            const int64_t m = batch_.logit_rows[r];
            std::memmove(x_ + r * s_.hidden, x_ + m * s_.hidden, size_t(s_.hidden) * sizeof(T));
            std::memmove(a_ + r * s_.query(), a_ + m * s_.query(), size_t(s_.query()) * sizeof(float));
        }
    }

    // The first rows of x_ normed, as the product with `packed` reads them.
    Operand norm(Stopwatch& watch, int64_t rank, const void* weight, const void* packed, int64_t num_rows) {
        const Operand result = operands_.make(rank, packed, num_rows, s_.hidden, [&](int64_t m, float* row) {
            rms_norm_row(x_ + m * s_.hidden, static_cast<const T*>(weight), model_.eps, s_.hidden, row);
        });
        watch.lap(StepStage::kNorm);
        return result;
    }

    // The keys and values that products ask for: fewer rows leave memory no time for it, more need caches themselves, and
    // those of a prompt alone are so few beside its products that asking costs more.
    KvAhead kv_to_come() const {
        const bool decodes = is_coded(header_of(model_.layers[0].gate_up).kind);
        const int64_t fewest = decodes ? kCodedRideRows : kFewestRidden;
        if (batch_.num_tokens < fewest || batch_.num_tokens > kMostRidden) return {};
        KvAhead all(shape_.kv, pool_, batch_.context_lens, batch_.block_tables, batch_.max_blocks, batch_.num_seqs);
        return all.num_bytes() < batch_.num_tokens * kFewestRowBytes ? KvAhead() : all;
    }

    // Of the keys and values of `layer`, what a product asks for before which `done` weights of those between two
    // attentions were multiplied.
    KvRide ride(int64_t layer, const void* packed, int64_t done) const {
        if (kv_ahead_.num_bytes() == 0 || layer == s_.num_layers) return {};
        const PackedHeader& header = header_of(packed);
        return KvRide(kv_ahead_, layer, done, done + header.out_features * header.in_features, s_.num_between(),
                      ceil_div(header.out_features, header.panel));
    }

    // This rank's share of a product's columns.
    template <typename Output>
    void product(int64_t rank, const Operand& rows, const void* packed, const Output& output) {
        const Share panels(ceil_div(output.out_features, header_of(packed).panel), rank, size_);
        const int64_t unit = panels_at_once(rows.kind);
        model_.team.divide(rank, panels.begin, panels.end, unit, unit,
                           [&](int64_t begin, int64_t end, int64_t next) {
                               multiply<T>(rows, packed, begin, end, output, next);
                           });
    }

    // silu(gate) * up as `down` reads it. A panel of ups meets the gates of its columns while those are in cache, unless a
    // panel holds some of either.
    Operand gated(Stopwatch& watch, int64_t rank, const Operand& rows, const Layer& layer) {
        if (s_.inner % header_of(layer.gate_up).panel != 0) {
            gated_apart(watch, rank, rows, layer);
        } else if (reads_bf16(header_of(layer.down).kind)) {
            const Operand inner = operands_.place(rank, layer.down, rows.num_rows, s_.inner);
            gate_panels(rank, rows, layer, NarrowInner{inner.laid_out.lines});
            meet(rank, watch, StepStage::kGateUp);
            return inner;
        } else {
            gate_panels(rank, rows, layer, WideInner<T>{inner_, s_.inner});
            meet(rank, watch, StepStage::kGateUp);
        }
        return operands_.prepare(rank, inner_, layer.down, rows.num_rows, s_.inner);
    }

    template <typename Inner>
    void gate_panels(int64_t rank, const Operand& rows, const Layer& layer, const Inner& inner) {
        const int64_t panel = header_of(layer.gate_up).panel, first_up = s_.inner / panel;
        const Share panels(first_up, rank, size_);
        const int64_t unit = panels_at_once(rows.kind);
        model_.team.divide(rank, panels.begin, panels.end, unit, unit, [&](int64_t begin, int64_t end, int64_t next) {
            static thread_local Scratch memory;
            const int64_t first = begin * panel, width = (end - begin) * panel;
            const Gates<T> gates{typed(memory, rows.num_rows * width), layer.gate_up_bias, first, width};
            const Ups<T, Inner> ups{gates, s_.inner, inner};
            multiply<T>(rows, layer.gate_up, begin, end, gates, first_up + begin);
            multiply<T>(rows, layer.gate_up, first_up + begin, first_up + end, ups, next);
        });
    }

    // Gate and up to wide_, then silu(gate) * up to inner_.
    void gated_apart(Stopwatch& watch, int64_t rank, const Operand& rows, const Layer& layer) {
        product(rank, rows, layer.gate_up, Store<T>{wide_, layer.gate_up_bias, 2 * s_.inner});
        meet(rank, watch, StepStage::kGateUp);
        const Share columns(s_.inner, rank, size_);
        const int64_t unit = 16 * kWidth, least = std::max(unit, ceil_div(4096, rows.num_rows));
        model_.team.divide(rank, columns.begin, columns.end, unit, least, [&](int64_t begin, int64_t end) {
            for (int64_t m = 0; m < rows.num_rows; ++m) {
                const T* gates = wide_ + m * 2 * s_.inner + begin;
                silu_mul_row(gates, gates + s_.inner, end - begin, inner_ + m * s_.inner + begin);
            }
        });
        meet(rank, watch, StepStage::kGate);
    }

    // Query and key heads are normed and rotated; queries are kept, keys and values go to the pool.
    void heads(int64_t rank, const Share& share, const Layer& layer, int64_t index) {
        model_.team.divide(rank, share.begin, share.end, 1, 32,
                           [&](int64_t begin, int64_t end) { heads(begin, end, layer, index); });
    }

    void heads(int64_t begin, int64_t end, const Layer& layer, int64_t index) {
        const int64_t per_row = s_.num_heads + 2 * s_.num_kv_heads, dim = s_.head_dim;
        const KvShape& kv = shape_.kv;
        for (int64_t i = begin; i < end; ++i) {
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

    void attention(int64_t rank, int64_t index, const std::vector<Item>& all) {
        Shape shape = shape_;
        shape.layer = index;
        const Share items(int64_t(all.size()), rank, size_);
        const auto attend_all = [&](int64_t begin, int64_t end) {
            static thread_local int64_t last = 0;  // a thread takes items from the front or from the back
            for (int64_t item = begin; item < end; ++item) {
                const bool forth = item == items.begin || (item > last && item < items.end - 1);
                const int64_t then = item + (forth ? 1 : -1);
                last = item;
                // of the heads of one sequence, rows lie side by side
                const bool goes_on = then < items.end && all[size_t(item)].num_heads == s_.num_kv_heads;
                attend(all[size_t(item)], shape, q_, s_.query(), pool_, batch_.query_starts, batch_.context_lens,
                       batch_.block_tables, batch_.max_blocks, a_, goes_on ? &all[size_t(then)] : nullptr);
            }
        };
        // their costs differ: one by one
        model_.team.divide(rank, items.begin, items.end, 1, 1, attend_all, items.end - items.begin);
    }

    void logits(Stopwatch& watch, int64_t rank) {
        if (batch_.num_logit_rows == 0) return;
        const Operand normed = operands_.make(
            rank, model_.lm_head, batch_.num_logit_rows, s_.hidden, [&](int64_t r, float* row) {
                rms_norm_row(x_ + (batch_.is_trimmed() ? r : batch_.logit_rows[r]) * s_.hidden,
                             static_cast<const T*>(model_.final_norm), model_.eps, s_.hidden, row);
            });
        watch.lap(StepStage::kNorm);
        product(rank, normed, model_.lm_head, Store<float>{batch_.logits, nullptr, s_.vocab});
        meet(rank, watch, StepStage::kHead);
        const Share rows(batch_.num_logit_rows, rank, size_);
        model_.team.divide(rank, rows.begin, rows.end, 1, 1, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r)
                batch_.best[r] = find_best(batch_.logits + r * s_.vocab, s_.vocab,
                                           batch_.maxima + r * ceil_div(s_.vocab, kBlock));
        });
        watch.lap(StepStage::kBest);
    }

    static constexpr int64_t kFewestRidden = 16, kMostRidden = 256;  // rows, while products ask for keys and values
    static constexpr int64_t kFewestRowBytes = 8 * 1024;  // of a layer
    static_assert(kFewestRidden > kRowTile);  // in several tiles a panel

    Model& model_;
    const Sizes& s_;
    const Batch& batch_;
    const int64_t size_;
    T *x_, *wide_, *q_;          // wide_: [rows, qkv] or [rows, gate and up]; q_: [rows, heads, head_dim]
    float* a_;                   // [rows, hidden or heads]: what the next product reads
    float* inner_;               // [rows, inner]: what `down` reads
    char* pool_;                 // rows of keys and values, see `KvShape`
    const Shape shape_;
    const std::vector<Item> items_, last_items_;  // last_items_: of the last layer
    const KvAhead kv_ahead_;
    Operands operands_;
};

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

// Before the first step: the team may have guests on num_cores cores while their owners rest, core i's being owners
// [owner_ends[i - 1], owner_ends[i]). 0, or -1 if the board cannot be opened or no thread be started.
int64_t baton_model_borrow(void* model, const char* board_path, int64_t num_cores, const int64_t* cores,
                           const int64_t* owner_ends, const int64_t* owners) {
    std::unique_ptr<CoreBoard> board = CoreBoard::open(board_path);
    if (!board) return -1;
    std::vector<LentCore> lent;
    for (int64_t i = 0; i < num_cores; ++i)
        lent.push_back({cores[i], {owners + (i ? owner_ends[i - 1] : 0), owners + owner_ends[i]}});
    try {
        static_cast<Model*>(model)->team.borrow(std::move(board), lent);
    } catch (const std::exception&) {
        return -1;
    }
    return 0;
}

int64_t baton_model_num_borrowed(void* model) { return static_cast<Model*>(model)->team.num_borrowed(); }

void baton_model_destroy(void* model) { delete static_cast<Model*>(model); }

int64_t baton_num_stages() { return int64_t(StepStage::kCount); }

// From the next step on, `seconds` [ranks, stages, 2] is added to: work and waiting per stage. Null: no longer.
void baton_model_profile(void* model, double* seconds) { static_cast<Model*>(model)->profile = seconds; }

// One step; one caller at a time. `fields`: those of Batch. Returns a Fault, whose place in its array is in *index;
// nothing is written then.
int64_t baton_forward(void* model, const void* fields, int64_t* index) {
    Model& m = *static_cast<Model*>(model);
    Batch batch;
    std::memcpy(&batch, fields, sizeof batch);
    const Fault fault = check(m, batch, index);
    if (fault != Fault::kNone) return int64_t(fault);
    m.team.gather(batch.num_tokens <= Model::kMostHelpedTokens);
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

// Logits to tokens, all rows of a step in one call.
//
// 1. The caller (`native_sampling.py`) has one `Rule` per request, made once, and says where each request stands.
// 2. A greedy row without wishes of its own is done: the forward pass has found its largest logit. If there are
//    enough other rows, the team wakes; rows are handed out one by one, and a row is one thread's from end to end.
// 3. A row: bad numbers mended and `processors.h`, on a copy where there is anything to change; then temperature,
//    top-k, top-p, min-p and one draw by `selection.h`; then log-probabilities of the raw row.
//
// A token is a function of its row, rule, progress and position: no arithmetic meets another row, and sums are exact.
#include "sampling.h"
#include "selection.h"
#include "team.h"
#include "threads.h"

namespace baton {
namespace {

constexpr float kLogprobFloor = -9999.0f;  // stands for -infinity
constexpr int64_t kRowsWorthWaking = 4;    // fewer take less time than a sleeping thread

// A random number in [0, 1) with 53 bits, for (seed, position): Philox4x32-10 (Salmon et al., SC'11).
double uniform(uint64_t seed, uint64_t position) {
    uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t product_0 = uint64_t(c0) * 0xD2511F53, product_1 = uint64_t(c2) * 0xCD9E8D57;
        c0 = uint32_t(product_1 >> 32) ^ c1 ^ k0;
        c2 = uint32_t(product_0 >> 32) ^ c3 ^ k1;
        c1 = uint32_t(product_1);
        c3 = uint32_t(product_0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return double((uint64_t(c0 >> 5) << 26) + (c1 >> 6)) * 0x1p-53;
}

// One thread's work memory, and what it does with a row.
class Worker {
public:
    // Whether the row had a NaN or +infinity.
    bool choose(const Request& request, int64_t index) {
        const float* raw = request.logits + index * request.stride;
        const Rule& rule = *request.rules[index];
        const Progress& progress = request.progress[index];
        size_ = request.size;
        bool is_broken = false;
        Row row{{raw, size_, request.maxima}, request.best[index]};
        if (!std::isfinite(raw[row.best])) {
            float* mended = mended_.floats(size_);
            std::transform(raw, raw + size_, mended, finite);
            is_broken = !std::equal(raw, raw + size_, mended);
            row = look_over(mended, raw_maxima_);
        } else if (request.maxima == nullptr) {
            row = look_over(raw, raw_maxima_);
        } else {
            row.scores.maxima += index * row.scores.num_blocks();
        }
        Row processed = row;
        if (!is_neutral(rule, progress)) {
            float* scores = processed_.floats(size_);
            std::copy(row.scores.values, row.scores.values + size_, scores);
            processors_.process(scores, size_, rule, progress);
            processed = look_over(scores, processed_maxima_);
        }
        const int64_t token = choose(processed, rule, request.positions[index]);
        request.tokens[index] = token;
        if (rule.num_logprobs >= 0)
            log_probabilities(row, token, rule.num_logprobs, request.logprobs + index,
                              request.top_ids + index * request.num_top,
                              request.top_logprobs + index * request.num_top);
        return is_broken;
    }

private:
    struct Row {
        Scores scores;
        int64_t best;
    };

    Row look_over(const float* values, Scratch& memory) {
        float* maxima = memory.floats(ceil_div(size_, kBlock));
        const int64_t best = find_best(values, size_, maxima);
        return {{values, size_, maxima}, best};
    }

    // Room for every score, and for the vector that `collect` writes ahead.
    Candidate* candidates(Scratch& memory) {
        return reinterpret_cast<Candidate*>(memory.floats((size_ + kWidth) * int64_t(sizeof(Candidate) / 4)));
    }

    double* sums() { return reinterpret_cast<double*>(sums_.floats(2 * ceil_div(size_, kBlock))); }

    int64_t choose(const Row& row, const Rule& rule, int64_t position) {
        const float peak = row.scores.values[row.best];
        if (peak == -kInfinity) {
            int64_t lowest = size_;
            for (int64_t id : rule.allowed)
                if (id >= 0) lowest = std::min(lowest, id);
            return lowest < size_ ? lowest : 0;
        }
        if (rule.temperature == 0) return row.best;
        const double u = uniform(uint64_t(rule.seed), uint64_t(position));
        return draw_token(row.scores, Softmax(peak, float(rule.temperature)), rule, u);
    }

    // Temperature, top-k, top-p, min-p, draw.
    int64_t draw_token(const Scores& scores, const Softmax& softmax, const Rule& rule, double u) {
        const float least = rule.min_p > 0 ? float(rule.min_p) : 0;
        Candidate *left = candidates(left_), *work = candidates(work_);
        int64_t count;
        double total;
        if (rule.top_k > 0 && rule.top_k < size_) {
            count = collect(scores, floor_of_largest(scores, rule.top_k), left);
            count = keep_largest(rule.top_k, left, count, work);
            total = weigh(softmax, left, count);
            if (rule.top_p < 1) count = keep_nucleus(rule.top_p * total, left, count, work);
        } else if (rule.top_p < 1) {
            total = weigh_blocks(scores, softmax, sums());
            count = collect_mass(scores, softmax, rule.top_p * total, total, left);
            count = keep_nucleus(rule.top_p * total, left, count, work);
        } else if (least > 0) {
            count = collect(scores, softmax.floor(double(least)), left);
            weigh(softmax, left, count);
        } else {
            total = weigh_blocks(scores, softmax, sums());
            return draw(scores, softmax, sums(), total, u);
        }
        return draw(left, count, least, u);
    }

    // Some first candidates whose weights reach `target` of `total`: the fewer, the better.
    int64_t collect_mass(const Scores& scores, const Softmax& softmax, double target, double total, Candidate* left) {
        // what weighs less than its share of the rest is less than the rest together
        const float enough = softmax.floor((total - target) / double(size_));
        for (const int64_t count : {64, 256}) {
            if (count >= size_) break;
            const float floor = floor_of_largest(scores, count);
            if (floor <= enough) break;
            const int64_t size = collect(scores, floor, left);
            if (weigh(softmax, left, size) >= target) return size;
        }
        const int64_t size = collect(scores, enough, left);
        if (weigh(softmax, left, size) >= target) return size;
        const int64_t all = collect(scores, -kInfinity, left);
        weigh(softmax, left, all);
        return all;
    }

    // Log-softmax at the token and at the `num_top` largest logits.
    void log_probabilities(const Row& row, int64_t token, int64_t num_top, float* logprob, int64_t* top_ids,
                           float* top_logprobs) {
        const Scores& logits = row.scores;
        const float peak = logits.values[row.best];
        const float log_total =
            peak == -kInfinity ? 0 : float(std::log(weigh_blocks(logits, Softmax(peak, 1), sums())));
        const auto of = [&](int64_t id) {
            const float logit = logits.values[id];
            return logit == -kInfinity ? kLogprobFloor : std::max(logit - peak - log_total, kLogprobFloor);
        };
        *logprob = of(token);
        num_top = std::min(num_top, size_);
        if (num_top == 0) return;
        Candidate* top = candidates(left_);
        const int64_t size = collect(logits, num_top < size_ ? floor_of_largest(logits, num_top) : -kInfinity, top);
        std::partial_sort(top, top + num_top, top + size, precedes);
        for (int64_t i = 0; i < num_top; ++i) {
            top_ids[i] = top[i].id();
            top_logprobs[i] = of(top_ids[i]);
        }
    }

    int64_t size_ = 0;
    Scratch mended_, processed_, raw_maxima_, processed_maxima_, sums_, left_, work_;
    Processors processors_;
};

bool is_plain_greedy(const Request& request, int64_t index) {
    const Rule& rule = *request.rules[index];
    return rule.temperature == 0 && rule.num_logprobs < 0 && is_neutral(rule, request.progress[index]) &&
           std::isfinite(request.logits[index * request.stride + request.best[index]]);
}

class Sampler {
public:
    explicit Sampler(int64_t num_threads) : team_(num_threads), workers_(size_t(num_threads)) {}

    // Returns how many rows had a NaN or +infinity.
    int64_t choose(const Request& request) {
        waiting_.clear();
        for (int64_t index = 0; index < request.num_rows; ++index) {
            if (is_plain_greedy(request, index))
                request.tokens[index] = request.best[index];
            else
                waiting_.push_back(index);
        }
        const int64_t num_waiting = int64_t(waiting_.size());
        std::atomic<int64_t> next{0}, num_broken{0};
        const auto body = [&](int64_t rank) {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_waiting;)
                if (workers_[size_t(rank)].choose(request, waiting_[size_t(i)]))
                    num_broken.fetch_add(1, std::memory_order_relaxed);
        };
        if (num_waiting < kRowsWorthWaking)
            body(0);
        else
            team_.run(body);
        return num_broken;
    }

private:
    Team team_;
    std::vector<Worker> workers_;
    std::vector<int64_t> waiting_;
};

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

// Null if no thread can be started.
void* baton_sampler_create(int64_t num_threads) {
    try {
        return new Sampler(num_threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void baton_sampler_destroy(void* sampler) { delete static_cast<Sampler*>(sampler); }

int64_t baton_maxima_block() { return kBlock; }

int64_t baton_sampler_largest_vocabulary() { return kLargestVocabulary; }

// One caller at a time. `fields`: those of Request. Returns how many rows had a NaN or +infinity, or -1 - the first row
// whose `best` is outside; nothing is written then.
int64_t baton_sample(void* sampler, const void* fields) {
    Request request;
    std::memcpy(&request, fields, sizeof request);
    for (int64_t row = 0; row < request.num_rows; ++row)
        if (request.best[row] < 0 || request.best[row] >= request.size) return -1 - row;
    return static_cast<Sampler*>(sampler)->choose(request);
}
}

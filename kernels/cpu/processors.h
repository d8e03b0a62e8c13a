// What a request's own parameters do to its row of logits, in place: penalties, bias, masks, in this order.
//
// The engine's `processors.py` is the definition and says why; each function here is one of its functions, in the
// same fp32 operations. Ids that name no logit have no effect.
#pragma once

#include <vector>

#include "simd.h"

namespace baton {

struct Ids {
    const int64_t* data;
    int64_t size;

    const int64_t* begin() const { return data; }
    const int64_t* end() const { return data + size; }
};

// A request's parameters, in the layout that `sampling_rules.py` writes. All fields of 8 bytes.
struct Rule {
    int64_t seed, top_k, num_logprobs, min_tokens;  // num_logprobs -1: none are asked for
    double temperature, top_p, min_p;               // temperature 0: greedy
    double repetition, frequency, presence;
    Ids bias_ids;
    const float* biases;
    Ids allowed, ends, bad_words;  // ends: EOS and stop ids; bad_words: each a length and as many ids
};

// Where a request stands: its history, which only some rules look at.
struct Progress {
    int64_t num_generated;
    Ids prompt, output;
};

// Whether `process` would leave every row as it is.
inline bool is_neutral(const Rule& rule, const Progress& progress) {
    return rule.repetition == 1 && rule.frequency == 0 && rule.presence == 0 && rule.bias_ids.size == 0 &&
           rule.allowed.size == 0 && rule.bad_words.size == 0 &&
           (progress.num_generated >= rule.min_tokens || rule.ends.size == 0);
}

inline float finite(float value) {
    if (value != value) return -kInfinity;
    return value == kInfinity ? std::numeric_limits<float>::max() : value;
}

class Processors {
public:
    // `scores` [size] has no NaN and no +infinity; neither before nor afterwards.
    void process(float* scores, int64_t size, const Rule& rule, const Progress& progress) {
        scores_ = scores;
        size_ = size;
        counts_.resize(size_t(size), 0);
        penalize(rule, progress);
        for (int64_t i = 0; i < rule.bias_ids.size; ++i)
            if (known(rule.bias_ids.data[i])) scores_[rule.bias_ids.data[i]] += rule.biases[i];
        for (const Ids& touched : {rule.bias_ids, progress.prompt, progress.output})
            for (int64_t id : touched)
                if (known(id)) scores_[id] = finite(scores_[id]);
        if (rule.allowed.size > 0) allow(rule.allowed);
        if (progress.num_generated < rule.min_tokens) mask_unless_last(rule.ends);
        if (rule.bad_words.size > 0) {
            find_completions(rule.bad_words, progress);
            mask_unless_last({completions_.data(), int64_t(completions_.size())});
        }
    }

private:
    bool known(int64_t id) const { return id >= 0 && id < size_; }

    void penalize(const Rule& rule, const Progress& progress) {
        if (rule.repetition != 1) {
            const float penalty = float(rule.repetition);
            for (const Ids& ids : {progress.prompt, progress.output})
                for (int64_t id : ids) {
                    if (!known(id) || counts_[size_t(id)]++ > 0) continue;
                    scores_[id] = scores_[id] > 0 ? scores_[id] / penalty : scores_[id] * penalty;
                }
            for (const Ids& ids : {progress.prompt, progress.output}) forget(ids);
        }
        if (rule.frequency == 0 && rule.presence == 0) return;
        for (int64_t id : progress.output)
            if (known(id)) ++counts_[size_t(id)];
        for (int64_t id : progress.output) {
            if (!known(id) || counts_[size_t(id)] == 0) continue;
            const float by_frequency = float(rule.frequency) * float(counts_[size_t(id)]);
            scores_[id] = scores_[id] - by_frequency;
            scores_[id] = scores_[id] - float(rule.presence);
            counts_[size_t(id)] = 0;
        }
    }

    void forget(const Ids& ids) {
        for (int64_t id : ids)
            if (known(id)) counts_[size_t(id)] = 0;
    }

    void allow(const Ids& ids) {
        keep_scores(ids);
        std::fill(scores_, scores_ + size_, -kInfinity);
        restore_scores(ids);
    }

    // Masks `ids`, unless nothing would be left to choose.
    void mask_unless_last(const Ids& ids) {
        keep_scores(ids);
        for (int64_t id : ids)
            if (known(id)) scores_[id] = -kInfinity;
        for (int64_t id = 0; id < size_; ++id)
            if (scores_[id] > -kInfinity) return;
        restore_scores(ids);
    }

    void keep_scores(const Ids& ids) {
        kept_.clear();
        for (int64_t id : ids) kept_.push_back(known(id) ? scores_[id] : 0);
    }

    void restore_scores(const Ids& ids) {
        for (int64_t i = 0; i < ids.size; ++i)
            if (known(ids.data[i])) scores_[ids.data[i]] = kept_[size_t(i)];
    }

    // The last id of every bad sequence whose other ids are how prompt and output end.
    void find_completions(const Ids& words, const Progress& progress) {
        completions_.clear();
        const int64_t num_prompt = progress.prompt.size, num_tokens = num_prompt + progress.output.size;
        for (const int64_t* word = words.begin(); word < words.end(); word += *word + 1) {
            const int64_t length = *word, begun = length - 1;
            if (length == 0 || begun > num_tokens) continue;
            bool matches = true;
            for (int64_t i = 0; i < begun && matches; ++i) {
                const int64_t place = num_tokens - begun + i;
                const int64_t id = place < num_prompt ? progress.prompt.data[place]
                                                      : progress.output.data[place - num_prompt];
                matches = id == word[1 + i];
            }
            if (matches) completions_.push_back(word[length]);
        }
    }

    float* scores_ = nullptr;
    int64_t size_ = 0;
    std::vector<int32_t> counts_;  // [size], all 0 between calls
    std::vector<float> kept_;
    std::vector<int64_t> completions_;
};

}  // namespace baton

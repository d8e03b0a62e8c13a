// Splits independent items over exactly the threads asked for; one thread costs nothing.
#pragma once

#include <omp.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <new>

namespace baton {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// body(begin, end) on contiguous shares of [0, num_items), each of at least `grain` items but the last.
template <typename Body>
inline void parallel_ranges(int64_t num_threads, int64_t num_items, int64_t grain, const Body& body) {
    num_threads = std::min(num_threads, ceil_div(num_items, grain));
    if (num_threads <= 1) return body(int64_t(0), num_items);
#pragma omp parallel num_threads(int(num_threads))
    {
        int64_t rank = omp_get_thread_num(), size = omp_get_num_threads();
        int64_t begin = num_items * rank / size, end = num_items * (rank + 1) / size;
        if (begin < end) body(begin, end);
    }
}

// body(item), items handed out one by one: for items of unequal cost.
template <typename Body>
inline void parallel_items(int64_t num_threads, int64_t num_items, const Body& body) {
    num_threads = std::min(num_threads, num_items);
    if (num_threads <= 1) {
        for (int64_t item = 0; item < num_items; ++item) body(item);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(num_threads))
    for (int64_t item = 0; item < num_items; ++item) body(item);
}

// Memory a thread keeps between calls, 64-byte aligned, contents undefined. What fills huge pages asks for them: the
// rows of a long step are walked with large strides, and small pages miss the translation cache at each.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { release(); }

    float* floats(int64_t count) {
        if (count > capacity_) {
            release();
            const size_t num_bytes = size_t(count) * sizeof(float);
            alignment_ = std::align_val_t(num_bytes >= kHugePageBytes ? kHugePageBytes : 64);
            data_ = static_cast<float*>(::operator new(num_bytes, alignment_));
            capacity_ = count;
#if defined(__linux__)
            // advice only: where there are no huge pages it changes nothing
            if (num_bytes >= kHugePageBytes) madvise(data_, num_bytes / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE);
#endif
        }
        return data_;
    }

private:
    static constexpr size_t kHugePageBytes = size_t(2) << 20;

    void release() {
        ::operator delete(data_, alignment_);
        data_ = nullptr;
        capacity_ = 0;
    }

    float* data_ = nullptr;
    int64_t capacity_ = 0;
    std::align_val_t alignment_{64};
};

}  // namespace baton

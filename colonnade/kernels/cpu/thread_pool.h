// Worker threads: the pool, the barrier between kernels, each thread's share of the work, and its scratch memory.
//
// A step of a small model has hundreds of barriers, so threads spin for SPIN before they sleep.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <unistd.h>

#include "arguments.h"

namespace {

constexpr auto SPIN = std::chrono::microseconds(50);  // how long a thread spins before it sleeps

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A counter that threads wait for: they spin for SPIN, then sleep.
class Counter {
  public:
    uint32_t value() const { return value_.load(); }
    void advance() {
        value_.fetch_add(1);
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
    }
    void wait_while(uint32_t old) {
        const auto end = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int i = 0; i < 32; i++) {
                if (value_.load() != old) return;
                pause();
            }
        } while (std::chrono::steady_clock::now() < end);
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return value_.load() != old; });
        sleepers_.fetch_sub(1);
    }

  private:
    std::atomic<uint32_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

class Barrier {
  public:
    void wait(int threads) {
        if (threads == 1) return;
        const uint32_t now = passed_.value();
        if (arrived_.fetch_add(1) + 1 == threads) {
            arrived_.store(0);
            taken_.store(0);
            passed_.advance();
        } else {
            passed_.wait_while(now);
        }
    }
    // Counts what threads take from a common queue (Queue); 0 after each barrier.
    std::atomic<int64_t>& taken() { return taken_; }

  private:
    alignas(64) std::atomic<int64_t> taken_{0};  // on a different cache line than the variables that waiting threads read
    alignas(64) std::atomic<int> arrived_{0};
    Counter passed_;
};

struct Job {
    void (*run)(const void* argument, int thread, int threads, Barrier& barrier) = nullptr;
    const void* argument = nullptr;
    int threads = 1;
};

// Worker threads, created when they are first needed and kept until the process ends.
class Pool {
  public:
    void run(Job job) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (job.threads > 1) {
            while (workers_ + 1 < job.threads) {
                std::thread(&Pool::work, this, ++workers_, started_.value()).detach();
            }
            done_.store(0);
            job_ = job;
            started_.advance();
        }
        job.run(job.argument, 0, job.threads, barrier_);
        // All workers acknowledge a job, including those that it does not use, before job_ may change.
        if (job.threads > 1) {
            while (true) {
                const uint32_t now = finished_.value();
                if (done_.load() == workers_) break;
                finished_.wait_while(now);
            }
        }
    }

  private:
    void work(int thread, uint32_t seen) {
        while (true) {
            started_.wait_while(seen++);
            const Job job = job_;
            if (thread < job.threads) job.run(job.argument, thread, job.threads, barrier_);
            const int all = job_workers();
            if (done_.fetch_add(1) + 1 == all) finished_.advance();
        }
    }
    int job_workers() const { return workers_; }

    std::mutex mutex_;
    int workers_ = 0;  // written only while no worker runs a job
    Job job_;
    Counter started_, finished_;
    std::atomic<int> done_{0};
    Barrier barrier_;
};

Pool& pool() {
    // A forked child has none of its parent's threads: it gets a pool of its own, and the old one is abandoned.
    static std::mutex mutex;
    static Pool* current = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (current == nullptr || owner != getpid()) {
        current = new Pool;
        owner = getpid();
    }
    return *current;
}

struct Share {
    int64_t begin, end;
};

// One thread's part of `count` items, in whole steps.
inline Share share(int64_t count, int64_t step, int thread, int threads) {
    const int64_t steps = ceil_div(count, step);
    const int64_t begin = steps * thread / threads * step, end = steps * (thread + 1) / threads * step;
    return {begin < count ? begin : count, end < count ? end : count};
}

// Items that threads divide among themselves: 3/4 of them in equal shares, and the rest in pieces, first come, first
// served.
//
// Equal shares take unequal time, because cores have unequal memory bandwidth and other processes use some of them: on 16
// cores of a shared machine, threads waited for the slowest one for 30 to 40% of a step.
class Queue {
  public:
    // `taken` counts the items taken from the rest; without it all items are in the equal shares. `step` items
    // belong together; `piece` is a multiple of them.
    Queue(int64_t count, int64_t step, int64_t piece, int thread, int threads, std::atomic<int64_t>* taken)
        : count_(count), piece_(piece), taken_(taken), own_(share(count, step, thread, threads)) {
        if (taken == nullptr) return;
        const int64_t each = ceil_div(count, step) * 3 / (4 * threads) * step;
        own_ = {each * thread, each * (thread + 1)};
        left_ = each * threads;
    }
    Share own() const { return own_; }
    bool empty() const { return taken_ == nullptr && own_.begin == own_.end; }
    // Takes the next piece, the first time this thread's equal share; false if nothing is left.
    bool next(Share& part) {
        if (first_) {
            first_ = false;
            part = own_;
            if (part.begin < part.end) return true;
        }
        if (taken_ == nullptr) return false;
        const int64_t begin = left_ + taken_->fetch_add(piece_), end = begin + piece_;
        part = {begin, end < count_ ? end : count_};
        return begin < count_;
    }

  private:
    int64_t count_, piece_, left_ = 0;
    std::atomic<int64_t>* taken_;
    Share own_;
    bool first_ = true;
};

// Memory of one thread, reused by all its kernels.
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }
    void start(int64_t bytes) {
        used_ = 0;
        if (bytes <= size_) return;
        std::free(memory_);
        size_ = 0;
        memory_ = static_cast<char*>(std::aligned_alloc(64, size_t(round_up(bytes, 64))));
        if (memory_ == nullptr) throw std::bad_alloc();
        size_ = round_up(bytes, 64);
    }
    template <typename T> T* take(int64_t count) {
        T* at = reinterpret_cast<T*>(memory_ + used_);
        used_ += bytes<T>(count);
        return at;
    }
    template <typename T> static int64_t bytes(int64_t count) { return round_up(count * int64_t(sizeof(T)), 64); }

  private:
    char* memory_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};

thread_local Scratch scratch;

}  // namespace

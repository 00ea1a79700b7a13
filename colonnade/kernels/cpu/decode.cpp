// Kernels of a decode step on a CPU: products of few rows, norms, rotary and cache write, paged attention, embedding.
//
// One file with a C interface, which kernels/cpu/library.py compiles for one instruction set: AVX-512 with VNNI, AVX2, or
// whatever the compiler's baseline has (portable vectors of 4 floats, for example NEON).
//
//     colonnade_run(calls, count, threads)     runs a list of calls, one after another, each on all threads
//
// A call is a kernel's number and its arguments. The list of a whole step runs as quickly as that of one kernel, so a
// recorded step costs one call from Python (kernels/cpu/calls.py).
//
// Numbers. Sums are in float32 and in an order that depends on the shape of one row only: neither on the number of
// rows, nor on how they are cut into tiles, nor on the number of threads. So a row's bits do not depend on the others.
// Weights are read as they are stored (kernels/linear/quantise.py), or in blocks of 16 outputs (blocks.h). With
// quantised weights a row of x is quantised to int8 with a scale per group (32 inputs; for int4 the weights' group),
// and products are exact sums of integers per group:
//
//     int8   y = s Σ_g z_g Σ_d q_d p_d                              x ≈ z p,  w ≈ s q
//     int4   y = Σ_g ( s_g z_g Σ_d q_d p_d  +  m_g z_g Σ_d p_d )    w ≈ s q + m
//
// Arguments are validated in Python; what changes between replays (tokens, slots, lengths, pages) is checked here.

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <unistd.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// -- vectors --------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)

constexpr int LANES = 16;
using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline Bytes low_nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }
// Each lane is the sum of four products of signed bytes. The instruction needs w unsigned, so it gets w + 128.
inline Ints dot(Bytes w, Bytes x) {
    const Ints lift = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), x);
    const Ints start = _mm512_sub_epi32(_mm512_setzero_si512(), lift);
    return _mm512_dpbusd_epi32(start, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x);
}
inline Ints dot_nibbles(Bytes low, Bytes high, Bytes x_low, Bytes x_high) {
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), low, x_low), high, x_high);
}
// The sum of each vector. Adjacent vectors are interleaved and added, until each lane has the sum of one.
inline Floats sums_of(const Floats* x) {
    Floats fours[4];
    for (int i = 0; i < 4; i++) {
        const Floats ab = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]), _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]));
        const Floats cd =
            _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]), _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]));
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    const auto halves = [](Floats a, Floats b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]));
}
inline Floats select(Floats x, const int32_t* lanes) { return _mm512_permutexvar_ps(_mm512_loadu_si512(lanes), x); }
// Pairs (s, m) of bfloat16: s is the low half of each word.
inline Floats low_halves(Bytes x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Floats high_halves(Bytes x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536))); }

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int LANES = 8;
using Floats = __m256;
using Ints = __m256i;
using Bytes = __m256i;

inline Bytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Floats x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Bytes low_nibbles(Bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return low_nibbles(_mm256_srli_epi16(b, 4)); }
// Each lane is the sum of four products of signed bytes. The instruction needs one factor unsigned: |w|, with the sign
// moved to x. Two products are at most 2 · 128 · 127, which fits 16 bits.
inline Ints dot(Bytes w, Bytes x) {
    const Ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline Ints dot_nibbles(Bytes low, Bytes high, Bytes x_low, Bytes x_high) {
    const Ints pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, x_low), _mm256_maddubs_epi16(high, x_high));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline Floats sums_of(const Floats* x) {  // as with AVX-512
    Floats fours[2];
    for (int i = 0; i < 2; i++) {
        const Floats ab = _mm256_hadd_ps(x[4 * i], x[4 * i + 1]), cd = _mm256_hadd_ps(x[4 * i + 2], x[4 * i + 3]);
        fours[i] = _mm256_hadd_ps(ab, cd);
    }
    return _mm256_add_ps(
        _mm256_permute2f128_ps(fours[0], fours[1], 0x20), _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
}
inline Floats select(Floats x, const int32_t* lanes) { return _mm256_permutevar8x32_ps(x, load_bytes(lanes)); }
inline Floats low_halves(Bytes x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Floats high_halves(Bytes x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536))); }

#else

constexpr int LANES = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(16)));

template <typename V> inline V load_vector(const void* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline Bytes load_bytes(const void* p) { return load_vector<Bytes>(p); }
inline Floats zero() { return Floats{}; }
inline Floats broadcast(float x) { return Floats{x, x, x, x}; }
inline Floats load(const float* p) { return load_vector<Floats>(p); }
inline Floats load(const uint16_t* p) {
    Floats x;
    for (int i = 0; i < LANES; i++) {
        const uint32_t bits = uint32_t(p[i]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        x[i] = value;
    }
    return x;
}
inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
inline float sum(Floats x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats to_floats(Ints x) { return Floats{float(x[0]), float(x[1]), float(x[2]), float(x[3])}; }
inline Bytes low_nibbles(Bytes b) { return b & 15; }
inline Bytes high_nibbles(Bytes b) { return (b >> 4) & 15; }
inline Ints dot(Bytes w, Bytes x) {
    // Products of the four bytes of each lane, which shifts of 32-bit lanes bring to their lowest byte one by one.
    const Ints a = load_vector<Ints>(&w), b = load_vector<Ints>(&x);
    return (a >> 24) * (b >> 24) + ((a << 8) >> 24) * ((b << 8) >> 24) + ((a << 16) >> 24) * ((b << 16) >> 24) +
           ((a << 24) >> 24) * ((b << 24) >> 24);
}
inline Ints dot_nibbles(Bytes low, Bytes high, Bytes x_low, Bytes x_high) { return dot(low, x_low) + dot(high, x_high); }
inline Floats sums_of(const Floats* x) { return Floats{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])}; }
inline Floats select(Floats x, const int32_t* lanes) {
    return Floats{x[lanes[0]], x[lanes[1]], x[lanes[2]], x[lanes[3]]};
}
inline Floats low_halves(Bytes x) {
    const Ints bits = load_vector<Ints>(&x) << 16;
    return load_vector<Floats>(&bits);
}
inline Floats high_halves(Bytes x) {
    const Ints bits = load_vector<Ints>(&x) & -65536;
    return load_vector<Floats>(&bits);
}

#endif

constexpr int64_t UNIT = 4 * LANES;  // bytes in a vector
constexpr int64_t X_GROUP = 32;      // inputs that share a scale when x is quantised for int8 weights
constexpr int64_t BAND = 128;        // outputs that are computed before bias, activation and residual are applied
constexpr int64_t AHEAD = 4096;      // bytes between the weights that are multiplied and those that are requested
constexpr int64_t PANEL = 64;        // rows of x that are prepared at once
constexpr int64_t KEYS_AHEAD = 24;   // likewise, in keys or values
constexpr int64_t SPLIT = 256;       // keys of one task of attention
constexpr auto SPIN = std::chrono::microseconds(50);  // how long a thread spins before it sleeps

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };
enum Kind : int64_t { PLAIN = 0, INT8 = 1, INT4 = 2, INT8_BLOCKS = 3, INT4_BLOCKS = 4 };
enum Activation : int64_t { NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3, RELU = 4 };
enum Error : int64_t { OK = 0, BAD_TOKEN = 1, BAD_SLOT = 2, BAD_LENGTH = 3, BAD_PAGE = 4, NO_MEMORY = 5 };

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return std::fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline float to_float(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline float to_float(float x) { return x; }
inline void assign(float& y, float x) { y = x; }
inline void assign(uint16_t& y, float x) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    y = x != x ? uint16_t(0x7FC0) : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// e^x to about one unit in the last place, by a polynomial for e^r, |r| <= ln 2 / 2 (the compiler vectorises it).
inline float exponential(float x) {
    const float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float shifted = multiply_add(bounded, 1.44269504f, 12582912.0f);
    const float n = shifted - 12582912.0f;
    const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, bounded));
    float p = 1.9875691500e-4f;
    p = multiply_add(p, r, 1.3981999507e-3f);
    p = multiply_add(p, r, 8.3334519073e-3f);
    p = multiply_add(p, r, 4.1665795894e-2f);
    p = multiply_add(p, r, 1.6666665459e-1f);
    p = multiply_add(p, r, 5.0000001201e-1f);
    p = multiply_add(p, r * r, r) + 1.0f;
    const int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return x != x ? x : p * scale;
}

inline float activate(float x, Activation activation) {
    switch (activation) {
        case SILU: return x / (1.0f + exponential(-x));
        case GELU_TANH: {
            const float inner = 0.7978845608f * multiply_add(0.044715f * x * x, x, x);
            return x - x / (1.0f + exponential(2.0f * inner));  // x (1 + tanh(inner)) / 2
        }
        case GELU: return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
        case RELU: return x < 0.0f ? 0.0f : x;
        default: return x;
    }
}

// -- threads --------------------------------------------------------------------------------------------------------

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
            passed_.advance();
        } else {
            passed_.wait_while(now);
        }
    }

  private:
    std::atomic<int> arrived_{0};
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
        // All workers acknowledge a job, also those that it does not use, before job_ may change.
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

// The part of `count` items of one thread, in whole steps.
inline Share share(int64_t count, int64_t step, int thread, int threads) {
    const int64_t steps = ceil_div(count, step);
    const int64_t begin = steps * thread / threads * step, end = steps * (thread + 1) / threads * step;
    return {begin < count ? begin : count, end < count ? end : count};
}

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

// -- rows -----------------------------------------------------------------------------------------------------------

// The first `count` elements of a vector, and zeros: nothing behind them is read.
template <typename T> inline Floats load_part(const T* p, int64_t count) {
    T values[LANES] = {};
    for (int64_t i = 0; i < count; i++) values[i] = p[i];
    return load(values);
}

#if defined(__AVX512BW__)
inline Bytes load_bytes_part(const void* p, int64_t count) {
    return _mm512_maskz_loadu_epi8(~uint64_t(0) >> (64 - count), p);  // 0 < count <= 64
}
#elif defined(__AVX2__)
inline Bytes load_bytes_part(const void* p, int64_t count) {
    alignas(32) static const int32_t mask[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const int* words = static_cast<const int*>(p);
    Bytes x = _mm256_maskload_epi32(words, load_bytes(mask + LANES - count / 4));
    if (count % 4 != 0) {
        int8_t values[UNIT];
        std::memcpy(values, &x, sizeof x);
        for (int64_t i = count / 4 * 4; i < count; i++) values[i] = static_cast<const int8_t*>(p)[i];
        x = load_bytes(values);
    }
    return x;
}
#else
inline Bytes load_bytes_part(const void* p, int64_t count) {
    int8_t values[UNIT] = {};
    std::memcpy(values, p, size_t(count));
    return load_bytes(values);
}
#endif

// Requests `bytes` of memory that are read later.
inline void prefetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

inline void read_row(const void* x, Dtype dtype, int64_t start, int64_t count, float* y) {
    if (dtype == FLOAT32) {
        std::memcpy(y, static_cast<const float*>(x) + start, size_t(count) * 4);
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(x) + start;
        for (int64_t i = 0; i < count; i++) y[i] = to_float(from[i]);
    }
}

inline void write_row(void* y, Dtype dtype, int64_t start, int64_t count, const float* x) {
    if (dtype == FLOAT32) {
        std::memcpy(static_cast<float*>(y) + start, x, size_t(count) * 4);
    } else {
        uint16_t* to = static_cast<uint16_t*>(y) + start;
        for (int64_t i = 0; i < count; i++) assign(to[i], x[i]);
    }
}

inline float element(const void* x, Dtype dtype, int64_t i) {
    return dtype == FLOAT32 ? static_cast<const float*>(x)[i] : to_float(static_cast<const uint16_t*>(x)[i]);
}

// The largest of x, of which NaN may be ignored.
inline float largest(const float* x, int64_t count) {
    float y = x[0];
    int64_t i = 0;
    if (count >= LANES) {
        Floats most = load(x);
        for (i = LANES; i + LANES <= count; i += LANES) most = larger(most, load(x + i));
        float values[LANES];
        store(values, most);
        for (float value : values) y = y < value ? value : y;
    }
    for (; i < count; i++) y = y < x[i] ? x[i] : y;
    return y;
}

inline float total_of(const float* x, int64_t count) {
    Floats sums = zero();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums = fma(load(x + i), broadcast(1.0f), sums);
    float y = sum(sums);
    for (; i < count; i++) y += x[i];
    return y;
}

// Σ a_i b_i, or Σ (a_i − c)(b_i − c), in an order that depends on `count` only.
inline float inner_product(const float* a, const float* b, int64_t count, float c = 0.0f) {
    Floats sums[4] = {zero(), zero(), zero(), zero()};
    const Floats shift = broadcast(-c), one = broadcast(1.0f);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Floats& to = sums[i / LANES % 4];
        to = fma(fma(load(a + i), one, shift), fma(load(b + i), one, shift), to);
    }
    float y = (sum(sums[0]) + sum(sums[1])) + (sum(sums[2]) + sum(sums[3]));
    for (; i < count; i++) y = multiply_add(a[i] - c, b[i] - c, y);
    return y;
}

struct NormWeights {
    const void* weight;  // null: no norm
    const void* bias;    // null: RMSNorm, else LayerNorm
    double eps;
};

// RMSNorm or LayerNorm of one row, in place.
inline void normalise(float* x, int64_t width, const NormWeights& norm, Dtype dtype) {
    float mean = 0.0f;
    if (norm.bias != nullptr) {
        mean = total_of(x, width) / float(width);
    }
    const float square = inner_product(x, x, width, mean) / float(width);
    const float factor = 1.0f / std::sqrt(square + float(norm.eps));
    for (int64_t i = 0; i < width; i++) x[i] = (x[i] - mean) * factor;
    if (dtype == FLOAT32) {
        const float* weight = static_cast<const float*>(norm.weight);
        for (int64_t i = 0; i < width; i++) x[i] *= weight[i];
    } else {
        for (int64_t i = 0; i < width; i++) x[i] *= element(norm.weight, dtype, i);
    }
    if (norm.bias != nullptr) {
        for (int64_t i = 0; i < width; i++) x[i] += element(norm.bias, dtype, i);
    }
}

// -- products -------------------------------------------------------------------------------------------------------

struct Matrix {
    const void* values;  // null: no matrix
    const void* scales;
    const void* bias;  // null: none
    int64_t kind, outputs, inputs, group;
};

// Rows of x as the products read them.
struct Rows {
    int64_t count, inputs, units, groups;
    const float* floats;  // (count, inputs rounded up to LANES), for plain weights
    int64_t float_stride;
    const int8_t* bytes;  // (count, units, UNIT), for int4 (count, units, 2, UNIT)
    const float* scales;  // (count, units, LANES): each lane's z
    const float* sums;    // int4: (count, groups rounded up to LANES): z_g Σ p_d
    int64_t sum_stride;
};

// int8 values p and the scale z of a group of x. A group that is not finite has a scale of NaN.
inline float quantise_group(const float* x, int64_t count, int8_t* p) {
    int32_t bits_of_most = 0;  // of values that are not negative, bits are ordered as the values; NaN is the largest
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7FFFFFFF;
        bits_of_most = bits_of_most < bits ? bits : bits_of_most;
    }
    if (bits_of_most >= 0x7F800000) {
        std::memset(p, 0, size_t(count));
        return std::nanf("");
    }
    float most;
    std::memcpy(&most, &bits_of_most, 4);
    const float inverse = most < 1e-30f ? 0.0f : 127.0f / most;
    for (int64_t i = 0; i < count; i++) {
        const float shifted = x[i] * inverse + 12582912.0f;  // rounds to nearest even
        int32_t bits;
        std::memcpy(&bits, &shifted, 4);
        p[i] = int8_t(bits);
    }
    return most < 1e-30f ? 0.0f : most / 127.0f;
}

// The lane order of int4 (kernels/linear/quantise.py): byte 4 c + b has inputs 2 b · G/8 + c and (2 b + 1) · G/8 + c.
template <int G> inline void interleave(const int8_t* p, int8_t* low, int8_t* high) {
    constexpr int W = G / 8;
    for (int c = 0; c < W; c++) {
        for (int b = 0; b < 4; b++) {
            low[4 * c + b] = p[2 * b * W + c];
            high[4 * c + b] = p[(2 * b + 1) * W + c];
        }
    }
}

inline int64_t unit_count(const Matrix& w) {
    return w.kind == INT8 ? ceil_div(w.inputs, UNIT) : ceil_div(ceil_div(w.inputs, w.group) * w.group / 2, UNIT);
}

inline void quantise_int8(const float* x, const Rows& rows, int8_t* p, float* scales) {
    constexpr int64_t PER = UNIT < X_GROUP ? X_GROUP : UNIT;  // whole groups and whole units
    alignas(64) float padded[PER];
    for (int64_t start = 0; start < rows.units * UNIT; start += PER) {
        const int64_t left = rows.inputs - start, count = left < PER ? (left < 0 ? 0 : left) : PER;
        std::memcpy(padded, x + start, size_t(count) * 4);
        std::memset(padded + count, 0, size_t(PER - count) * 4);
        int8_t values[PER];
        float z[PER / X_GROUP];
        for (int64_t g = 0; g < PER / X_GROUP; g++) {
            z[g] = quantise_group(padded + g * X_GROUP, X_GROUP, values + g * X_GROUP);
        }
        const int64_t bytes = rows.units * UNIT - start < PER ? rows.units * UNIT - start : PER;
        std::memcpy(p + start, values, size_t(bytes));
        for (int64_t i = 0; i < bytes / 4; i++) scales[start / 4 + i] = z[4 * i / X_GROUP];
    }
}

template <int G> void quantise_int4(const float* x, const Rows& rows, int8_t* p, float* scales, float* sums) {
    alignas(64) float padded[G];
    int8_t values[G], low[G / 2], high[G / 2];
    std::memset(p, 0, size_t(2 * rows.units * UNIT));
    std::memset(scales, 0, size_t(rows.units * LANES) * 4);
    for (int64_t g = 0; g < rows.groups; g++) {
        const int64_t left = rows.inputs - g * G, count = left < G ? left : G;
        std::memcpy(padded, x + g * G, size_t(count) * 4);
        std::memset(padded + count, 0, size_t(G - count) * 4);
        const float z = quantise_group(padded, G, values);
        int32_t total = 0;
        for (int i = 0; i < G; i++) total += values[i];
        sums[g] = z * float(total);
        interleave<G>(values, low, high);
        constexpr int64_t PART = G / 2 < UNIT ? G / 2 : UNIT;
        for (int64_t i = 0; i < G / 2; i += PART) {
            const int64_t at = g * G / 2 + i, unit = at / UNIT, offset = at % UNIT;
            std::memcpy(p + 2 * unit * UNIT + offset, low + i, size_t(PART));
            std::memcpy(p + (2 * unit + 1) * UNIT + offset, high + i, size_t(PART));
            for (int64_t l = 0; l < PART / 4; l++) scales[unit * LANES + offset / 4 + l] = z;
        }
    }
    for (int64_t g = rows.groups; g < rows.sum_stride; g++) sums[g] = 0.0f;
}

// For int4: the lane with the scale of each lane of unit j, of LANES groups' scales.
template <int G> struct GroupLanes {
    int32_t lane[G / 8][LANES];
    constexpr GroupLanes() : lane{} {
        for (int j = 0; j < G / 8; j++) {
            for (int l = 0; l < LANES; l++) lane[j][l] = int32_t((j * UNIT + 4 * l) / (G / 2));
        }
    }
};
template <int G> constexpr GroupLanes<G> GROUP_LANES{};

// A tile of R rows of x times O rows of W: y[r][o]. `at` is the first row of x, `first` the first output.
template <typename T> struct PlainProduct {
    static constexpr int FOUR_ROWS_OUTPUTS = LANES == 16 ? 4 : 2, ONE_ROW_OUTPUTS = 4;
    template <int R, int O> static void tile(const Matrix& w, const Rows& x, int64_t at, int64_t first, float (*y)[O]) {
        const T* weights = static_cast<const T*>(w.values) + first * w.inputs;
        const float* rows = x.floats + at * x.float_stride;
        Floats sums[R][O];
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) sums[r][o] = zero();
        int64_t k = 0;
        for (; k + LANES <= w.inputs; k += LANES) {
            Floats v[O];
            for (int o = 0; o < O; o++) v[o] = load(weights + o * w.inputs + k);
            for (int r = 0; r < R; r++) {
                const Floats xs = load(rows + r * x.float_stride + k);
                for (int o = 0; o < O; o++) sums[r][o] = fma(v[o], xs, sums[r][o]);
            }
        }
        if (k < w.inputs) {
            for (int o = 0; o < O; o++) {
                const Floats v = load_part(weights + o * w.inputs + k, w.inputs - k);
                for (int r = 0; r < R; r++) sums[r][o] = fma(v, load(rows + r * x.float_stride + k), sums[r][o]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) y[r][o] = sum(sums[r][o]);
    }
};

struct Int8Product {
    static constexpr int FOUR_ROWS_OUTPUTS = LANES == 16 ? 4 : 2, ONE_ROW_OUTPUTS = 4;
    template <int R, int O> static void tile(const Matrix& w, const Rows& x, int64_t at, int64_t first, float (*y)[O]) {
        const int8_t* weights = static_cast<const int8_t*>(w.values) + first * w.inputs;
        const int8_t* rows = x.bytes + at * x.units * UNIT;
        const float* scales = x.scales + at * x.units * LANES;
        Floats sums[R][O];
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) sums[r][o] = zero();
        const auto step = [&](int64_t u, const Bytes(&v)[O]) {
            for (int r = 0; r < R; r++) {
                const Bytes xs = load_bytes(rows + (r * x.units + u) * UNIT);
                const Floats z = load(scales + (r * x.units + u) * LANES);
                for (int o = 0; o < O; o++) sums[r][o] = fma(to_floats(dot(v[o], xs)), z, sums[r][o]);
            }
        };
        const int64_t whole = w.inputs / UNIT;
        for (int64_t u = 0; u < whole; u++) {
            Bytes v[O];
            for (int o = 0; o < O; o++) v[o] = load_bytes(weights + o * w.inputs + u * UNIT);
            step(u, v);
        }
        if (whole < x.units) {
            Bytes v[O];
            for (int o = 0; o < O; o++) {
                v[o] = load_bytes_part(weights + o * w.inputs + whole * UNIT, w.inputs - whole * UNIT);
            }
            step(whole, v);
        }
        const float* row_scales = static_cast<const float*>(w.scales) + first;
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) y[r][o] = sum(sums[r][o]) * row_scales[o];
    }
};

template <int G> struct Int4Product {
    static constexpr int FOUR_ROWS_OUTPUTS = 2, ONE_ROW_OUTPUTS = 4;
    template <int R, int O> static void tile(const Matrix& w, const Rows& x, int64_t at, int64_t first, float (*y)[O]) {
        const int64_t bytes = x.groups * G / 2;  // of a row of W
        const uint8_t* weights = static_cast<const uint8_t*>(w.values) + first * bytes;
        const uint32_t* pairs = static_cast<const uint32_t*>(w.scales) + first * x.groups;
        const int8_t* rows = x.bytes + at * x.units * 2 * UNIT;
        const float* scales = x.scales + at * x.units * LANES;
        const float* x_sums = x.sums + at * x.sum_stride;
        Floats sums[R][O];
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) sums[r][o] = zero();
        const auto step = [&](int64_t u, const Bytes(&v)[O], const Floats(&s)[O], const int32_t* lanes) {
            Bytes low[O], high[O];
            Floats spread[O];
            for (int o = 0; o < O; o++) {
                low[o] = low_nibbles(v[o]);
                high[o] = high_nibbles(v[o]);
                spread[o] = select(s[o], lanes);
            }
            for (int r = 0; r < R; r++) {
                const int8_t* p = rows + (r * x.units + u) * 2 * UNIT;
                const Bytes x_low = load_bytes(p), x_high = load_bytes(p + UNIT);
                const Floats z = load(scales + (r * x.units + u) * LANES);
                for (int o = 0; o < O; o++) {
                    const Floats part = to_floats(dot_nibbles(low[o], high[o], x_low, x_high));
                    sums[r][o] = fma(multiply(part, spread[o]), z, sums[r][o]);
                }
            }
        };
        for (int64_t g = 0; g < x.groups; g += LANES) {  // LANES groups, G / 8 units
            const bool whole = g + LANES <= x.groups;
            Floats s[O];
            for (int o = 0; o < O; o++) {
                const uint32_t* from = pairs + o * x.groups + g;
                const Bytes both = whole ? load_bytes(from) : load_bytes_part(from, 4 * (x.groups - g));
                s[o] = low_halves(both);
                const Floats m = high_halves(both);
                for (int r = 0; r < R; r++) sums[r][o] = fma(m, load(x_sums + r * x.sum_stride + g), sums[r][o]);
            }
            const int64_t from = g * (G / 2), left = bytes - from;
            for (int64_t j = 0; j < G / 8 && j * UNIT < left; j++) {
                Bytes v[O];
                for (int o = 0; o < O; o++) {
                    const uint8_t* p = weights + o * bytes + from + j * UNIT;
                    v[o] = left - j * UNIT >= UNIT ? load_bytes(p) : load_bytes_part(p, left - j * UNIT);
                }
                step(from / UNIT + j, v, s, GROUP_LANES<G>.lane[j]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int o = 0; o < O; o++) y[r][o] = sum(sums[r][o]);
    }
};

template <typename P, int R, int O>
inline void product_tile(const Matrix& w, const Rows& x, int64_t at, int64_t first, float* y) {
    float values[R][O];
    P::template tile<R, O>(w, x, at, first, values);
    for (int r = 0; r < R; r++)
        for (int o = 0; o < O; o++) y[r * BAND + o] = values[r][o];
}

// Bytes of a row of W.
inline int64_t row_bytes(const Matrix& w, Dtype dtype) {
    if (w.kind == INT8 || w.kind == INT8_BLOCKS) return w.inputs;
    if (w.kind == INT4 || w.kind == INT4_BLOCKS) return ceil_div(w.inputs, w.group) * w.group / 2;
    return w.inputs * (dtype == FLOAT32 ? 4 : 2);
}

// y (rows, BAND) of outputs [part.begin, part.end), at most BAND of them.
template <typename P> void product(const Matrix& w, const Rows& x, int64_t bytes, Share part, float* y) {
    constexpr int ONE = P::ONE_ROW_OUTPUTS, FOUR = P::FOUR_ROWS_OUTPUTS;
    const char* values = static_cast<const char*>(w.values);
    const int64_t pairs = w.kind == INT4 ? ceil_div(w.inputs, w.group) * 4 : 0;
    int64_t o = part.begin;
    for (; o + ONE <= part.end; o += ONE) {
        int64_t t = 0;
        prefetch(values + o * bytes + AHEAD, ONE * bytes);
        if (w.kind == INT4) prefetch(static_cast<const char*>(w.scales) + o * pairs + AHEAD / 8, ONE * pairs);
        for (; t + 4 <= x.count; t += 4) {
            for (int i = 0; i < ONE; i += FOUR) {
                product_tile<P, 4, FOUR>(w, x, t, o + i, y + t * BAND + (o - part.begin) + i);
            }
        }
        for (; t < x.count; t++) product_tile<P, 1, ONE>(w, x, t, o, y + t * BAND + (o - part.begin));
    }
    for (; o < part.end; o++) {
        for (int64_t t = 0; t < x.count; t++) product_tile<P, 1, 1>(w, x, t, o, y + t * BAND + (o - part.begin));
    }
}

void any_product(const Matrix& w, Dtype dtype, const Rows& x, Share part, float* y) {
    const int64_t bytes = row_bytes(w, dtype);
    if (w.kind == INT8) return product<Int8Product>(w, x, bytes, part, y);
    if (w.kind == INT4 && w.group == 32) return product<Int4Product<32>>(w, x, bytes, part, y);
    if (w.kind == INT4 && w.group == 64) return product<Int4Product<64>>(w, x, bytes, part, y);
    if (w.kind == INT4) return product<Int4Product<128>>(w, x, bytes, part, y);
    if (dtype == FLOAT32) return product<PlainProduct<float>>(w, x, bytes, part, y);
    return product<PlainProduct<uint16_t>>(w, x, bytes, part, y);
}

#include "blocks.h"

// y = W x̂ + b (+ residual), or y = act(G x̂ + c) ⊙ (W x̂ + b), or y = act(W x̂ + b); x̂ is x or norm(x).
struct Linear {
    const void* x;
    const void* residual;  // null: none; may be y
    void* y;
    NormWeights norm;
    Matrix weight, gate;
    int64_t rows, x_stride, dtype, activation;

    // Few rows are cut by outputs, and each thread prepares all of them for itself, which costs less than waiting for
    // another thread. Many rows are cut by rows.
    void run(int, int thread, int threads, std::atomic<int64_t>&) const {
        const bool by_rows = rows >= 32 * threads;
        const Share outputs = by_rows ? Share{0, weight.outputs} : share(weight.outputs, BLOCK, thread, threads);
        const Share mine = by_rows ? share(rows, 4, thread, threads) : Share{0, rows};
        if (outputs.begin == outputs.end) return;
        for (int64_t t = mine.begin; t < mine.end; t += PANEL) {
            const Share part{t, t + PANEL < mine.end ? t + PANEL : mine.end};
            if (weight.kind >= INT8_BLOCKS) block_panel(part, outputs);
            else panel(part, outputs);
        }
    }

    // Row t of x after the norm, in float32, with zeros up to `padded`.
    void prepare(int64_t t, int64_t padded, float* row) const {
        read_row(x, Dtype(dtype), t * x_stride, weight.inputs, row);
        std::memset(row + weight.inputs, 0, size_t(padded - weight.inputs) * 4);
        if (norm.weight != nullptr) normalise(row, weight.inputs, norm, Dtype(dtype));
    }

    void block_panel(Share part, Share outputs) const {
        const bool int8 = weight.kind == INT8_BLOCKS;
        const int64_t group = int8 ? X_GROUP : weight.group, count = part.end - part.begin;
        const int64_t groups = ceil_div(weight.inputs, group), stride = groups * group;
        scratch.start(
            Scratch::bytes<float>(stride) + Scratch::bytes<int8_t>(count * stride) +
            3 * Scratch::bytes<float>(count * groups) + 2 * Scratch::bytes<float>(count * BAND));
        float* const row = scratch.take<float>(stride);
        int8_t* const bytes = scratch.take<int8_t>(count * stride);
        float* const scales = scratch.take<float>(count * groups);
        float* const sums = scratch.take<float>(count * groups);
        int32_t* const totals = scratch.take<int32_t>(count * groups);
        float* const ys = scratch.take<float>(count * BAND);
        float* const gs = scratch.take<float>(count * BAND);
        for (int64_t t = 0; t < count; t++) {
            prepare(part.begin + t, stride, row);
            const int64_t i = t * groups;
            if (group == 32) quantise_block_row<32>(row, groups, bytes + t * stride, scales + i, sums + i, totals + i);
            else if (group == 64) quantise_block_row<64>(row, groups, bytes + t * stride, scales + i, sums + i, totals + i);
            else quantise_block_row<128>(row, groups, bytes + t * stride, scales + i, sums + i, totals + i);
        }
        const BlockRows x_rows{count, stride, groups, bytes, scales, sums, totals};
        for (int64_t o = outputs.begin; o < outputs.end; o += BAND) {
            const Share some{o, o + BAND < outputs.end ? o + BAND : outputs.end};
            any_block_product(weight, x_rows, some, ys);
            if (gate.values != nullptr) any_block_product(gate, x_rows, some, gs);
            for (int64_t t = 0; t < count; t++) finish(some, part.begin + t, ys + t * BAND, gs + t * BAND);
        }
    }

    void panel(Share part, Share outputs) const {
        const Dtype type = Dtype(dtype);
        const int64_t count = part.end - part.begin;
        const bool plain = weight.kind == PLAIN, int4 = weight.kind == INT4;
        Rows x_rows{};
        x_rows.count = count;
        x_rows.inputs = weight.inputs;
        x_rows.float_stride = round_up(weight.inputs, LANES);
        x_rows.units = plain ? 0 : unit_count(weight);
        x_rows.groups = int4 ? ceil_div(weight.inputs, weight.group) : 0;
        x_rows.sum_stride = round_up(x_rows.groups, LANES);
        const int64_t floats = (plain ? count : 1) * x_rows.float_stride, x_bytes = x_rows.units * UNIT * (int4 ? 2 : 1);
        const int64_t bytes = count * x_bytes, scales = count * x_rows.units * LANES;
        const int64_t sums = count * x_rows.sum_stride, band = count * BAND;
        scratch.start(
            Scratch::bytes<float>(floats) + Scratch::bytes<int8_t>(bytes) + Scratch::bytes<float>(scales) +
            Scratch::bytes<float>(sums) + 2 * Scratch::bytes<float>(band));
        float* const float_rows = scratch.take<float>(floats);
        int8_t* const byte_rows = scratch.take<int8_t>(bytes);
        float* const lane_scales = scratch.take<float>(scales);
        float* const group_sums = scratch.take<float>(sums);
        float* const ys = scratch.take<float>(band);
        float* const gs = scratch.take<float>(band);
        x_rows.floats = float_rows;
        x_rows.bytes = byte_rows;
        x_rows.scales = lane_scales;
        x_rows.sums = group_sums;
        for (int64_t t = 0; t < count; t++) {
            float* const row = float_rows + (plain ? t * x_rows.float_stride : 0);
            prepare(part.begin + t, x_rows.float_stride, row);
            int8_t* const p = byte_rows + t * x_bytes;
            float* const z = lane_scales + t * x_rows.units * LANES;
            float* const s = group_sums + t * x_rows.sum_stride;
            if (weight.kind == INT8) quantise_int8(row, x_rows, p, z);
            else if (int4 && weight.group == 32) quantise_int4<32>(row, x_rows, p, z, s);
            else if (int4 && weight.group == 64) quantise_int4<64>(row, x_rows, p, z, s);
            else if (int4) quantise_int4<128>(row, x_rows, p, z, s);
        }
        for (int64_t o = outputs.begin; o < outputs.end; o += BAND) {
            const Share some{o, o + BAND < outputs.end ? o + BAND : outputs.end};
            any_product(weight, type, x_rows, some, ys);
            if (gate.values != nullptr) any_product(gate, type, x_rows, some, gs);
            for (int64_t t = 0; t < count; t++) finish(some, part.begin + t, ys + t * BAND, gs + t * BAND);
        }
    }

    // Requests the first weights that this thread will read.
    void announce(int thread, int threads) const {
        const Share mine = rows >= 32 * threads ? Share{0, weight.outputs} : share(weight.outputs, BLOCK, thread, threads);
        const int64_t bytes = row_bytes(weight, Dtype(dtype)), left = (mine.end - mine.begin) * bytes;
        prefetch(static_cast<const char*>(weight.values) + mine.begin * bytes, left < AHEAD ? left : AHEAD);
    }

    void finish(Share part, int64_t row, float* ys, float* gs) const {
        const Dtype type = Dtype(dtype);
        const int64_t count = part.end - part.begin, start = row * weight.outputs + part.begin;
        if (weight.bias != nullptr) {
            for (int64_t i = 0; i < count; i++) ys[i] += element(weight.bias, type, part.begin + i);
        }
        if (gate.values != nullptr) {
            if (gate.bias != nullptr) {
                for (int64_t i = 0; i < count; i++) gs[i] += element(gate.bias, type, part.begin + i);
            }
            if (activation == SILU) {
                for (int64_t i = 0; i < count; i++) ys[i] *= activate(gs[i], SILU);
            } else {
                for (int64_t i = 0; i < count; i++) ys[i] *= activate(gs[i], Activation(activation));
            }
        } else if (activation == GELU_TANH) {
            for (int64_t i = 0; i < count; i++) ys[i] = activate(ys[i], GELU_TANH);
        } else if (activation != NONE) {
            for (int64_t i = 0; i < count; i++) ys[i] = activate(ys[i], Activation(activation));
        }
        if (residual != nullptr) {
            for (int64_t i = 0; i < count; i++) ys[i] += element(residual, type, start + i);
        }
        write_row(y, type, start, count, ys);
    }
};

inline void apply_norm(float* x, int64_t width, const NormWeights& norm, Dtype dtype) { normalise(x, width, norm, dtype); }

#include "experts.h"

// -- the other kernels of a step ------------------------------------------------------------------------------------

// y = table[tokens] (+ residual), plain rows, or int8 with their scales.
struct Embedding {
    const int64_t* tokens;
    Matrix table;
    const void* residual;  // null: none; may be y
    void* y;
    int64_t rows, dtype;

    void run(int, int thread, int threads, std::atomic<int64_t>& error) const {
        const Share mine = share(rows, 1, thread, threads);
        const int64_t width = table.inputs;
        scratch.start(Scratch::bytes<float>(width));
        float* const row = scratch.take<float>(width);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            if (tokens[t] < 0 || tokens[t] >= table.outputs) {
                error.store(BAD_TOKEN);
                continue;
            }
            if (table.kind == INT8) {
                const int8_t* q = static_cast<const int8_t*>(table.values) + tokens[t] * width;
                const float scale = static_cast<const float*>(table.scales)[tokens[t]];
                for (int64_t i = 0; i < width; i++) row[i] = float(q[i]) * scale;
            } else if (table.kind == INT8_BLOCKS) {
                const int8_t* block = static_cast<const int8_t*>(table.values) + tokens[t] / BLOCK * BLOCK * width;
                const int8_t* q = block + tokens[t] % BLOCK * 4;
                const float scale = static_cast<const float*>(table.scales)[tokens[t]];
                for (int64_t i = 0; i < width; i++) row[i] = float(q[i / 4 * 4 * BLOCK + i % 4]) * scale;
            } else {
                read_row(table.values, Dtype(dtype), tokens[t] * width, width, row);
            }
            if (residual != nullptr) {
                for (int64_t i = 0; i < width; i++) row[i] += element(residual, Dtype(dtype), t * width + i);
            }
            write_row(y, Dtype(dtype), t * width, width, row);
        }
    }
};

// y = norm(x), rows of `width`.
struct Norm {
    const void* x;
    NormWeights norm;
    void* y;
    int64_t rows, width, dtype;

    void run(int, int thread, int threads, std::atomic<int64_t>&) const {
        const Share mine = share(rows, 1, thread, threads);
        scratch.start(Scratch::bytes<float>(width));
        float* const row = scratch.take<float>(width);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            read_row(x, Dtype(dtype), t * width, width, row);
            normalise(row, width, norm, Dtype(dtype));
            write_row(y, Dtype(dtype), t * width, width, row);
        }
    }
};

// The rotary factors of each token (kernels/rotary.py): own = (cos, cos), other = (−sin, sin).
struct Rotation {
    const int64_t* positions;
    const float* theta;
    void *own, *other;
    double factor;
    int64_t rows, half, dtype;

    void run(int, int thread, int threads, std::atomic<int64_t>&) const {
        const Share mine = share(rows, 1, thread, threads);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            for (int64_t i = 0; i < half; i++) {
                const float angle = float(positions[t]) * theta[i];
                const float c = std::cos(angle) * float(factor), s = std::sin(angle) * float(factor), minus = -s;
                const int64_t at = 2 * half * t + i;
                write_row(own, Dtype(dtype), at, 1, &c);
                write_row(own, Dtype(dtype), at + half, 1, &c);
                write_row(other, Dtype(dtype), at, 1, &minus);
                write_row(other, Dtype(dtype), at + half, 1, &s);
            }
        }
    }
};

// Queries from a fused projection; keys and values to the cache (kernels/attention/cache_write.py).
struct RopeWrite {
    const void* qkv;                  // (rows, kv_heads, group + 2, width)
    const void *own, *other;          // (rows, width), or null: no rotation
    NormWeights q_norm, k_norm;       // of each head
    const int64_t* slots;
    void *keys, *values, *q;
    int64_t rows, kv_heads, group, width, slot_count, dtype;

    void run(int, int thread, int threads, std::atomic<int64_t>& error) const {
        const Share mine = share(rows * kv_heads, 1, thread, threads);
        const Dtype type = Dtype(dtype);
        scratch.start(4 * Scratch::bytes<float>(width));
        float* const head = scratch.take<float>(width);
        float* const turned = scratch.take<float>(width);
        float* const cosines = scratch.take<float>(width);
        float* const sines = scratch.take<float>(width);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const int64_t t = i / kv_heads, k = i % kv_heads;
            if (slots[t] < 0 || slots[t] >= slot_count) {
                error.store(BAD_SLOT);
                continue;
            }
            if (own != nullptr) {
                read_row(own, type, t * width, width, cosines);
                read_row(other, type, t * width, width, sines);
            }
            const int64_t cached = (slots[t] * kv_heads + k) * width;
            for (int64_t g = 0; g < group + 2; g++) {
                read_row(qkv, type, (i * (group + 2) + g) * width, width, head);
                const NormWeights& norm = g < group ? q_norm : k_norm;
                if (g <= group && norm.weight != nullptr) normalise(head, width, norm, type);
                const float* from = head;
                if (g <= group && own != nullptr) {
                    const int64_t half = width / 2;
                    for (int64_t j = 0; j < half; j++) {
                        turned[j] = multiply_add(head[j + half], sines[j], head[j] * cosines[j]);
                        turned[j + half] = multiply_add(head[j], sines[j + half], head[j + half] * cosines[j + half]);
                    }
                    from = turned;
                }
                if (g < group) write_row(q, type, ((t * kv_heads + k) * group + g) * width, width, from);
                else write_row(g == group ? keys : values, type, cached, width, from);
            }
        }
    }
};

// Attention of each row to the keys of its request, up to its own position (kernels/attention/reference.py, paged).
//
// A task is SPLIT keys of one row and one key/value head, with all query heads that share it. Rows with more keys merge
// the tasks' softmax states in the second phase. Tasks begin at multiples of SPLIT, so they do not depend on the batch.
struct Attention {
    const void *q, *keys, *values;    // (rows, heads, width); (pages, page_tokens, kv_heads, width)
    const int32_t *tables, *lengths, *cu_queries;
    float* partial;                   // (rows, heads, most_splits, width + 2): m, l, Σ e^(s − m) v
    void* out;                        // (rows, heads, width)
    int64_t rows, requests, heads, kv_heads, width, page_tokens, pages, table_width, most_splits, window, dtype;

    static constexpr int PHASES = 2;

    // Keys [begin, end) that a row sees, and its request; an invalid row sees none.
    struct Seen {
        int64_t request, begin, end;
        int64_t first() const { return begin / SPLIT; }
        int64_t splits() const { return end > begin ? ceil_div(end, SPLIT) - first() : 0; }
    };
    Seen seen(int64_t row, int64_t& request, std::atomic<int64_t>& error) const {
        while (request < requests && cu_queries[request + 1] <= row) request++;
        if (request >= requests) return {0, 0, 0};
        const int64_t length = lengths[request], after = cu_queries[request + 1] - 1 - row;
        if (length == 0) return {request, 0, 0};
        if (length < 0 || length > table_width * page_tokens || length <= after) {
            error.store(BAD_LENGTH);
            return {request, 0, 0};
        }
        const int64_t end = length - after;
        return {request, window > 0 && end > window ? end - window : 0, end};
    }

    void run(int phase, int thread, int threads, std::atomic<int64_t>& error) const {
        const int64_t group = heads / kv_heads;
        int64_t tasks = 0, request = 0;
        if (phase == 1) {
            const Share mine = share(rows * heads, 1, thread, threads);
            for (int64_t i = mine.begin; i < mine.end; i++) {
                const Seen row = seen(i / heads, request, error);
                if (row.splits() > 1) merge(i, row.splits());
            }
            return;
        }
        for (int64_t t = 0; t < rows; t++) tasks += kv_heads * seen(t, request, error).splits();
        const Share mine = share(tasks, 1, thread, threads);
        const int64_t padded = round_up(width, LANES);
        scratch.start(
            2 * Scratch::bytes<float>(group * padded) + Scratch::bytes<float>(group * SPLIT) +
            Scratch::bytes<int64_t>(SPLIT));
        float* const query = scratch.take<float>(group * padded);
        float* const sums = scratch.take<float>(group * padded);
        float* const scores = scratch.take<float>(group * SPLIT);
        int64_t* const at = scratch.take<int64_t>(SPLIT);
        int64_t task = 0;
        request = 0;
        for (int64_t t = 0; t < rows; t++) {
            const Seen row = seen(t, request, error);
            if (row.end == row.begin && thread == 0) {
                for (int64_t i = 0; i < heads * width; i++) {
                    const float nothing = 0.0f;
                    write_row(out, Dtype(dtype), t * heads * width + i, 1, &nothing);
                }
            }
            const int64_t splits = row.splits(), last = task + kv_heads * splits;
            for (int64_t i = task < mine.begin ? mine.begin : task; i < last && i < mine.end; i++) {
                const int64_t k = (i - task) / splits, s = (i - task) % splits;
                if (dtype == FLOAT32) split<float>(t, k, s, row, query, sums, scores, at, error);
                else split<uint16_t>(t, k, s, row, query, sums, scores, at, error);
            }
            task = last;
        }
    }

    template <typename T>
    void split(
        int64_t t, int64_t k, int64_t s, const Seen& row, float* query, float* sums, float* scores, int64_t* at,
        std::atomic<int64_t>& error) const {
        const int64_t group = heads / kv_heads, padded = round_up(width, LANES), head = t * heads + k * group;
        const int64_t from = (row.first() + s) * SPLIT, to = from + SPLIT;
        const int64_t begin = from < row.begin ? row.begin : from, end = to < row.end ? to : row.end;
        const int64_t count = end - begin;
        const int32_t* table = tables + row.request * table_width;
        for (int64_t i = 0; i < count;) {
            const int64_t page = table[(begin + i) / page_tokens], offset = (begin + i) % page_tokens;
            if (page < 0 || page >= pages) {
                error.store(BAD_PAGE);
                return;
            }
            for (int64_t j = offset; j < page_tokens && i < count; j++, i++) {
                at[i] = ((page * page_tokens + j) * kv_heads + k) * width;
            }
        }
        const float scale = 1.0f / std::sqrt(float(width));
        for (int64_t g = 0; g < group; g++) {
            float* const row_q = query + g * padded;
            read_row(q, Dtype(dtype), (head + g) * width, width, row_q);
            for (int64_t i = 0; i < width; i++) row_q[i] *= scale;
            for (int64_t i = width; i < padded; i++) row_q[i] = 0.0f;
        }
        const int64_t vector_bytes = width * int64_t(sizeof(T));
        for (int64_t i = 0; i < count; i += LANES) {
            const T* near[LANES];  // behind the last key, it is repeated
            for (int64_t n = 0; n < LANES; n++) {
                near[n] = static_cast<const T*>(keys) + at[i + n < count ? i + n : count - 1];
                const int64_t next = i + n + KEYS_AHEAD, value = count > KEYS_AHEAD ? next - count : i + n;
                if (next < count) prefetch(static_cast<const T*>(keys) + at[next], vector_bytes);
                // Values are read next; the first of them are requested while the last keys are read.
                else if (value < KEYS_AHEAD && value < count) prefetch(static_cast<const T*>(values) + at[value], vector_bytes);
            }
            for (int64_t g = 0; g < group; g++) store(scores + g * SPLIT + i, score(query + g * padded, near));
        }
        std::memset(sums, 0, size_t(group * padded) * 4);
        const bool alone = row.splits() == 1;
        for (int64_t g = 0; g < group; g++) {
            float* const weights = scores + g * SPLIT;
            const float most = largest(weights, count);
            for (int64_t i = 0; i < count; i++) weights[i] = exponential(weights[i] - most);
            const float total = total_of(weights, count);
            weigh<T>(weights, at, count, sums + g * padded, g == 0);
            if (alone) {
                for (int64_t i = 0; i < width; i++) sums[g * padded + i] /= total;
                write_row(out, Dtype(dtype), (head + g) * width, width, sums + g * padded);
            } else {
                float* const to_state = state(head + g, s);
                to_state[0] = most;
                to_state[1] = total;
                std::memcpy(to_state + 2, sums + g * padded, size_t(width) * 4);
            }
        }
    }

    // The products of one query with LANES keys.
    template <typename T> Floats score(const float* query, const T* const* near) const {
        Floats sums[LANES];
        for (int n = 0; n < LANES; n++) sums[n] = zero();
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const Floats q = load(query + i);
            for (int n = 0; n < LANES; n++) sums[n] = fma(q, load(near[n] + i), sums[n]);
        }
        if (i < width) {
            const Floats q = load(query + i);
            for (int n = 0; n < LANES; n++) sums[n] = fma(q, load_part(near[n] + i, width - i), sums[n]);
        }
        return sums_of(sums);
    }

    // sums += Σ weights[i] values[i], four keys at a time, so that sums are loaded and stored once for four.
    template <typename T>
    void weigh(const float* weights, const int64_t* at, int64_t count, float* sums, bool first) const {
        const T* all = static_cast<const T*>(values);
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            for (int64_t n = i + KEYS_AHEAD; first && n < i + KEYS_AHEAD + 4 && n < count; n++) {
                prefetch(all + at[n], width * int64_t(sizeof(T)));
            }
            const Floats p[4] = {
                broadcast(weights[i]), broadcast(weights[i + 1]), broadcast(weights[i + 2]), broadcast(weights[i + 3])};
            int64_t j = 0;
            for (; j + LANES <= width; j += LANES) {
                Floats y = load(sums + j);
                for (int n = 0; n < 4; n++) y = fma(p[n], load(all + at[i + n] + j), y);
                store(sums + j, y);
            }
            if (j < width) {
                Floats y = load(sums + j);
                for (int n = 0; n < 4; n++) y = fma(p[n], load_part(all + at[i + n] + j, width - j), y);
                store(sums + j, y);
            }
        }
        for (; i < count; i++) {
            const Floats p = broadcast(weights[i]);
            int64_t j = 0;
            for (; j + LANES <= width; j += LANES) store(sums + j, fma(p, load(all + at[i] + j), load(sums + j)));
            if (j < width) store(sums + j, fma(p, load_part(all + at[i] + j, width - j), load(sums + j)));
        }
    }

    float* state(int64_t head, int64_t s) const { return partial + (head * most_splits + s) * (width + 2); }

    void merge(int64_t head, int64_t splits) const {
        float most = state(head, 0)[0], total = 0.0f;
        bool broken = false;
        for (int64_t s = 0; s < splits; s++) {
            const float m = state(head, s)[0];
            broken = broken || m != m;
            most = most < m ? m : most;
        }
        scratch.start(Scratch::bytes<float>(width));
        float* const sums = scratch.take<float>(width);
        std::memset(sums, 0, size_t(width) * 4);
        for (int64_t s = 0; s < splits; s++) {
            const float* const part = state(head, s);
            const float factor = broken ? std::nanf("") : exponential(part[0] - most);
            total = multiply_add(factor, part[1], total);
            for (int64_t i = 0; i < width; i++) sums[i] = multiply_add(factor, part[2 + i], sums[i]);
        }
        for (int64_t i = 0; i < width; i++) sums[i] /= total;
        write_row(out, Dtype(dtype), head * width, width, sums);
    }
};

// -- running a list -------------------------------------------------------------------------------------------------

struct Call {
    int64_t kernel;
    const void* arguments;
};

enum Kernel : int64_t { LINEAR = 0, EMBEDDING = 1, NORM = 2, ROTATION = 3, ROPE_WRITE = 4, ATTENTION = 5, EXPERTS = 6 };

struct Step {
    const Call* calls;
    int64_t count;
    std::atomic<int64_t>* error;
};

template <typename K>
void run_kernel(const void* arguments, int phase, int thread, int threads, std::atomic<int64_t>& error) {
    try {
        static_cast<const K*>(arguments)->run(phase, thread, threads, error);
    } catch (const std::bad_alloc&) {
        error.store(NO_MEMORY);
    }
}

void run_step(const void* argument, int thread, int threads, Barrier& barrier) {
    const Step& step = *static_cast<const Step*>(argument);
    for (int64_t i = 0; i < step.count; i++) {
        const Call& call = step.calls[i];
        const int phases = call.kernel == ATTENTION ? Attention::PHASES : call.kernel == EXPERTS ? Experts::PHASES : 1;
        for (int phase = 0; phase < phases; phase++) {
            const void* a = call.arguments;
            switch (call.kernel) {
                case LINEAR: run_kernel<Linear>(a, phase, thread, threads, *step.error); break;
                case EMBEDDING: run_kernel<Embedding>(a, phase, thread, threads, *step.error); break;
                case NORM: run_kernel<Norm>(a, phase, thread, threads, *step.error); break;
                case ROTATION: run_kernel<Rotation>(a, phase, thread, threads, *step.error); break;
                case ROPE_WRITE: run_kernel<RopeWrite>(a, phase, thread, threads, *step.error); break;
                case ATTENTION: run_kernel<Attention>(a, phase, thread, threads, *step.error); break;
                case EXPERTS: run_kernel<Experts>(a, phase, thread, threads, *step.error); break;
            }
            if (i + 1 < step.count && step.calls[i + 1].kernel == LINEAR) {
                static_cast<const Linear*>(step.calls[i + 1].arguments)->announce(thread, threads);
            }
            barrier.wait(threads);
        }
    }
}


}  // namespace

extern "C" {

// Runs the calls in order, on `threads` threads; returns 0, or an Error.
int64_t colonnade_run(const Call* calls, int64_t count, int64_t threads) {
    std::atomic<int64_t> error{OK};
    const Step step{calls, count, &error};
    pool().run({run_step, &step, int(threads < 1 ? 1 : threads)});
    return error.load();
}

// Lanes of a float vector: 16, 8 or 4.
int64_t colonnade_lanes() { return LANES; }
}

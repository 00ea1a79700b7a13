// Small runs of every kernel of kernels/cpu/decode.cpp, under a sanitizer (tests/unit/test_cpu_library.py).
//
// Every array has its exact size, so that AddressSanitizer sees an access behind it. Sizes are odd on purpose. With an
// argument each kernel runs once in each format: continuous integration has little CPU time.

#include "decode.cpp"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

namespace {

uint32_t state = 1;

float number() {
    state = state * 1664525u + 1013904223u;
    return float(int32_t(state)) / 2147483648.0f;
}

std::vector<char> elements(int64_t count, Dtype dtype) {
    std::vector<char> x(size_t(count * (dtype == FLOAT32 ? 4 : 2)));
    for (int64_t i = 0; i < count; i++) {
        const float value = number();
        write_row(x.data(), dtype, i, 1, &value);
    }
    return x;
}

std::vector<char> integers(int64_t count) {
    std::vector<char> x(static_cast<size_t>(count));
    for (char& each : x) each = char(number() * 127.0f);
    return x;
}

struct Weight {
    std::vector<char> values, scales, bias;
    Matrix matrix;

    Weight(Kind kind, int64_t outputs, int64_t inputs, int64_t group, Dtype dtype) {
        const int64_t groups = ceil_div(inputs, group);
        bias = elements(outputs, dtype);
        if (kind == PLAIN) values = elements(outputs * inputs, dtype);
        if (kind == INT8 || kind == INT8_BLOCKS) {
            values = integers(outputs * inputs);
            scales = elements(outputs, FLOAT32);
        }
        if (kind == INT4 || kind == INT4_BLOCKS) {
            values = integers(outputs * groups * group / 2);
            scales = elements(outputs * groups * 2, BFLOAT16);
        }
        matrix = {values.data(), scales.data(), bias.data(), kind, outputs, inputs, group};
    }
};

void check(int64_t error, const char* what) {
    if (error != OK) {
        std::printf("%s: error %d\n", what, int(error));
        std::exit(1);
    }
}

void products(Dtype dtype, int64_t threads, bool few) {
    const struct { Kind kind; int64_t group; } formats[] = {{PLAIN, 1}, {INT8, 1}, {INT4, 32}, {INT4, 64}, {INT4, 128},
                        {INT8_BLOCKS, 1}, {INT4_BLOCKS, 32}, {INT4_BLOCKS, 64}, {INT4_BLOCKS, 128}};
    const int64_t sizes[][2] = {{5, 3}, {37, 70}, {130, 200}};
    for (const auto& format : formats) {
        for (const auto& size : sizes) {
            if (few && size[0] != 37) continue;
            for (int64_t rows : {1, 7, 15}) {
                if (few != (rows == 7)) continue;  // 7: tiles of four, two and one rows
                const bool blocked = format.kind >= INT8_BLOCKS;
                const int64_t outputs = blocked ? round_up(size[0], BLOCK) : size[0];
                const int64_t inputs = blocked ? round_up(size[1], 4) : size[1];
                Weight weight(format.kind, outputs, inputs, format.group, dtype);
                Weight gate(format.kind, outputs, inputs, format.group, dtype);
                const auto x = elements(rows * inputs, dtype), norm = elements(inputs, dtype);
                auto y = elements(rows * outputs, dtype);
                Linear linear{x.data(), y.data(), y.data(), {norm.data(), nullptr, 1e-5}, weight.matrix, gate.matrix,
                              rows, inputs, dtype, SILU};
                const Call call{LINEAR, &linear};
                check(colonnade_run(&call, 1, threads), "linear");
            }
        }
    }
}

void experts(Dtype dtype, int64_t threads, Kind kind) {
    const int64_t rows = 5, width = 36, units = 32, count = 3, active = 2, choices = rows * active;
    const int64_t wide = kind == PLAIN ? width : round_up(width, BLOCK);
    Weight up(kind, count * units, wide, 32, dtype), gate(kind, count * units, wide, 32, dtype);
    Weight down(kind, count * wide, units, 32, dtype), router(PLAIN, count, wide, 1, dtype);
    const auto part = [&](const Weight& w) {
        Matrix first = w.matrix;
        first.outputs /= count;
        const auto bytes = [&](const std::vector<char>& x) { return int64_t(x.size()) / count; };
        return ExpertMatrices{first, bytes(w.values), bytes(w.scales), bytes(w.bias)};
    };
    const auto x = elements(rows * wide, dtype), norm = elements(wide, dtype);
    auto y = elements(rows * wide, dtype), normed = elements(rows * wide, dtype);
    auto hidden = elements(choices * units, dtype), outs = elements(choices * wide, dtype);
    std::vector<int32_t> ids(static_cast<size_t>(choices)), places(static_cast<size_t>(choices));
    std::vector<float> shares(static_cast<size_t>(choices));
    Experts step{x.data(), y.data(), {norm.data(), nullptr, 1e-5}, router.matrix, part(up), part(gate), part(down),
                 normed.data(), hidden.data(), outs.data(), ids.data(), places.data(), shares.data(),
                 rows, active, 1, SILU, dtype, 1.0};
    const Call call{EXPERTS, &step};
    check(colonnade_run(&call, 1, threads), "experts");
}

void step(Dtype dtype, int64_t threads) {
    const int64_t rows = 5, kv = 2, group = 3, width = 20, heads = kv * group, page = 7, pages = 90, vocabulary = 11;
    const int64_t lengths64[] = {1, 300, 40};
    const std::vector<int32_t> lengths{1, 300, 40}, offsets{0, 1, 2, 5};
    const int64_t table_width = ceil_div(lengths64[1], page), splits = ceil_div(table_width * page, SPLIT);
    std::vector<int32_t> tables;
    for (int64_t i = 0; i < 3 * table_width; i++) tables.push_back(int32_t((i * 7) % pages));
    const std::vector<int64_t> tokens{0, 10, 3, 3, 1}, positions{0, 299, 37, 38, 39}, slots{0, 629, 8, 9, 10};
    const auto table = elements(vocabulary * width, dtype), gain = elements(width, dtype), bias = elements(width, dtype);
    auto x = elements(rows * width, dtype), y = elements(rows * width, dtype);
    auto own = elements(rows * width, dtype), other = elements(rows * width, dtype);
    const auto theta = elements(width / 2, FLOAT32), qkv = elements(rows * kv * (group + 2) * width, dtype);
    auto keys = elements(pages * page * kv * width, dtype), values = elements(pages * page * kv * width, dtype);
    auto q = elements(rows * heads * width, dtype), out = elements(rows * heads * width, dtype);
    std::vector<float> partial(size_t(rows * heads * splits * (width + 2)));
    const NormWeights norm{gain.data(), nullptr, 1e-5}, layer_norm{gain.data(), bias.data(), 1e-5};
    Embedding embed{tokens.data(), {table.data(), nullptr, nullptr, PLAIN, vocabulary, width, width}, nullptr, x.data(), rows, dtype};
    Norm normed{x.data(), layer_norm, y.data(), rows, width, dtype};
    Rotation rotation{positions.data(), reinterpret_cast<const float*>(theta.data()), own.data(), other.data(), 1.0, rows,
                      width / 2, dtype};
    RopeWrite rope{qkv.data(), own.data(), other.data(), norm, norm, slots.data(), keys.data(), values.data(), q.data(),
                   rows, kv, group, width, pages * page, dtype};
    Attention attention{q.data(), keys.data(), values.data(), tables.data(), lengths.data(), offsets.data(),
                        partial.data(), out.data(), rows, 3, heads, kv, width, page, pages, table_width, splits, 0, dtype,
                        width};
    Attention window = attention;
    window.window = 270;
    const Call calls[] = {{EMBEDDING, &embed}, {NORM, &normed}, {ROTATION, &rotation}, {ROPE_WRITE, &rope},
                          {ATTENTION, &attention}, {ATTENTION, &window}};
    for (int i = 0; i < 3; i++) check(colonnade_run(calls, 6, threads), "step");
    const std::vector<int64_t> bad_tokens{0, 11, 3, 3, -1};
    embed.tokens = bad_tokens.data();
    if (colonnade_run(calls, 6, threads) != BAD_TOKEN) check(BAD_TOKEN, "a token outside the table was not detected");
}

void latent(Dtype dtype, int64_t threads) {
    const int64_t rows = 5, heads = 3, plain = 7, rope = 6, rank = 133, value_width = 5, page = 7, pages = 50;
    const int64_t width = rank + rope, table_width = ceil_div(300, page), splits = ceil_div(table_width * page, SPLIT);
    const std::vector<int32_t> lengths{1, 300, 40}, offsets{0, 1, 2, 5};
    std::vector<int32_t> tables;
    for (int64_t i = 0; i < 3 * table_width; i++) tables.push_back(int32_t((i * 7) % pages));
    const std::vector<int64_t> slots{0, 349, 8, 9, 10};
    const auto q = elements(rows * heads * (plain + rope), dtype), kv = elements(rows * width, dtype);
    const auto own = elements(rows * rope, dtype), other = elements(rows * rope, dtype), gain = elements(rank, dtype);
    const auto up = elements(heads * (plain + value_width) * rank, dtype);
    auto cache = elements(pages * page * width, dtype), queries = elements(rows * heads * width, dtype);
    auto sums = elements(rows * heads * rank, dtype), y = elements(rows * heads * value_width, dtype);
    std::vector<float> partial(size_t(rows * heads * splits * (rank + 2)));
    LatentQueries absorb{q.data(), kv.data(), own.data(), other.data(), {gain.data(), nullptr, 1e-5}, up.data(),
                         slots.data(), cache.data(), queries.data(), rows, heads, plain, rope, rank, value_width,
                         pages * page, dtype, 0.7};
    Attention attention{queries.data(), cache.data(), cache.data(), tables.data(), lengths.data(), offsets.data(),
                        partial.data(), sums.data(), rows, 3, heads, 1, width, page, pages, table_width, splits, 0, dtype,
                        rank};
    LatentValues values{sums.data(), up.data(), y.data(), rows, heads, plain, value_width, rank, dtype};
    const Call calls[] = {{LATENT_QUERIES, &absorb}, {ATTENTION, &attention}, {LATENT_VALUES, &values}};
    for (int i = 0; i < 3; i++) check(colonnade_run(calls, 3, threads), "latent");
    const std::vector<int64_t> bad_slots{0, 350, 8, -1, 10};
    absorb.slots = bad_slots.data();
    if (colonnade_run(calls, 3, threads) != BAD_SLOT) check(BAD_SLOT, "a slot outside the cache was not detected");
}

}  // namespace

int main(int count, char**) {
    const bool few = count > 1;
    for (int64_t threads : {1, 2, 3, 5}) {
        if (few != (threads == 3)) continue;
        for (Dtype dtype : {FLOAT32, BFLOAT16}) {
            products(dtype, threads, few);
            for (Kind kind : {PLAIN, INT8_BLOCKS, INT4_BLOCKS}) experts(dtype, threads, kind);
            step(dtype, threads);
            latent(dtype, threads);
        }
    }
    std::printf("done\n");
    return 0;
}

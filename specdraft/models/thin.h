// What a decoding step is made of, for its few rows n, with AVX2: weights in bf16, all else in fp32.
//
// A product y [n,O] = x [n,I] @ w [O,I]^T (+ bias [O]) is bound by memory: every weight is read once for up to 8 rows.
// bf16 is the upper half of fp32. Of 16 weights in one register a shift gives the even columns and a mask the odd ones, so the
// even columns of each 16 of x are moved before the odd ones.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace thin {

constexpr long GROUP = 16;         // columns that one load of weights holds
constexpr long BLOCK = 24;         // rows of w that stay in the first cache while all rows of x pass
constexpr long EIGHT = 8;          // outputs
constexpr long NARROW = 96;        // columns
constexpr long PART = 256;         // columns of an MLP that a thread takes at once
constexpr long AHEAD = 2048;       // bytes: where a load of weights also asks for those to come

inline float widen(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline float sum(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

constexpr uint32_t WINDOW[GROUP] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};

// The first `count` of 16 weights, zeros behind. Behind the last row of all there is nothing to read.
inline __m256i load_end(const uint16_t* w, long count, bool is_last) {
    if (is_last) {
        uint16_t end[GROUP] = {};
        std::memcpy(end, w, count * sizeof(uint16_t));
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(end));
    }
    const uint16_t* keep = reinterpret_cast<const uint16_t*>(WINDOW) + GROUP - count;
    return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keep)));
}

// One row of w against N rows of x. U groups at a time, their even and odd columns in S = 1 or 2 sums: N*U*S chains of
// additions hide the latency of one, and fit the 16 registers. rest: columns of the last group, 1 to 16.
// is_last: nothing may be read behind the row.
template <int N, int U, int S>
void dot(const uint16_t* w, const float* x, float bias, float* y, long outputs, long columns, long rest, bool is_last) {
    __m256 sums[U][S][N];
    for (auto& group : sums)
        for (auto& parity : group)
            for (auto& s : parity) s = _mm256_setzero_ps();
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
    auto add = [&](int u, long k, __m256i weights) {
        const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(weights, 16));
        const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(weights, upper));
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const float* row = x + i * columns + k;
            sums[u][0][i] = _mm256_fmadd_ps(even, _mm256_loadu_ps(row), sums[u][0][i]);
            sums[u][S - 1][i] = _mm256_fmadd_ps(odd, _mm256_loadu_ps(row + 8), sums[u][S - 1][i]);
        }
    };
    auto load = [&](long k) {
        _mm_prefetch(reinterpret_cast<const char*>(w + k) + AHEAD, _MM_HINT_T0);
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + k));
    };
    long k = 0;
    for (; k + U * GROUP < columns; k += U * GROUP) {
#pragma GCC unroll 8
        for (int u = 0; u < U; u++) add(u, k + u * GROUP, load(k + u * GROUP));
    }
    for (; k + GROUP < columns; k += GROUP) add(0, k, load(k));
    add(0, k, rest == GROUP ? load(k) : load_end(w + k, rest, is_last));
    for (int i = 0; i < N; i++) {
        __m256 total = _mm256_setzero_ps();
        for (auto& group : sums)
            for (auto& parity : group) total = _mm256_add_ps(total, parity[i]);
        y[i * outputs] = sum(total) + bias;
    }
}

// EIGHT narrow rows of w, one behind the other, against one row of x: their sums are added up together, which for so short a row is
// most of the work. There must be another row behind them.
inline void dot_eight(const uint16_t* w, const float* x, float* y, long width, long columns, long rest) {
    __m256 sums[EIGHT];
    for (auto& s : sums) s = _mm256_setzero_ps();
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
    auto add = [&](long k, auto load) {
        const __m256 at_even = _mm256_loadu_ps(x + k), at_odd = _mm256_loadu_ps(x + k + 8);
#pragma GCC unroll 8
        for (int o = 0; o < EIGHT; o++) {
            const uint16_t* at = w + o * width + k;
            _mm_prefetch(reinterpret_cast<const char*>(at) + AHEAD, _MM_HINT_T0);
            const __m256i weights = load(at);
            sums[o] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(weights, 16)), at_even, sums[o]);
            sums[o] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(weights, upper)), at_odd, sums[o]);
        }
    };
    for (long k = 0; k + GROUP < columns; k += GROUP)
        add(k, [](const uint16_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); });
    add(columns - GROUP, [&](const uint16_t* at) { return load_end(at, rest, false); });
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]), _mm256_hadd_ps(sums[6], sums[7]));
    _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1)));
    _mm_storeu_ps(y + 4, _mm_add_ps(_mm256_castps256_ps128(high), _mm256_extractf128_ps(high, 1)));
}

using Dot = void (*)(const uint16_t*, const float*, float, float*, long, long, long, bool);
constexpr Dot DOTS[] = {dot<1, 4, 2>, dot<2, 2, 2>, dot<3, 2, 2>, dot<4, 1, 2>,
                        dot<5, 1, 2>, dot<6, 1, 2>, dot<7, 1, 1>, dot<8, 1, 1>};
constexpr long MOST = sizeof(DOTS) / sizeof(Dot);

// x [count, width] -> [count, columns], the even columns of each group before its odd ones, zeros behind.
inline void spread(const float* x, float* spread, long count, long width, long columns) {
    for (long i = 0; i < count; i++)
        for (long k = 0; k < width; k++) spread[i * columns + k / GROUP * GROUP + k % 2 * 8 + k % GROUP / 2] = x[i * width + k];
}

// What follows is called by all threads of a parallel region together. They share what products, attention and the MLP make, and have
// all of it on return; what is small (norms, sums) each computes for itself, which is cheaper than to wait for another.

// x: n rows of `width`; bias may be null.
inline void product(const float* x, const uint16_t* w, const uint16_t* bias, float* y, long n, long width, long outputs) {
    const long columns = (width + GROUP - 1) / GROUP * GROUP;
    const long rest = width - (columns - GROUP);
    static thread_local std::vector<float> rows;
    rows.assign(n * columns, 0.0f);
    spread(x, rows.data(), n, width, columns);
#pragma omp for schedule(static)
    for (long start = 0; start < outputs; start += BLOCK)
        for (long i = 0; i < n; i += MOST) {
            const Dot dot = DOTS[std::min(MOST, n - i) - 1];
            long o = start;
            if (n == 1 && columns <= NARROW && !bias)
                for (; o + EIGHT <= std::min(outputs - 1, start + BLOCK); o += EIGHT)
                    dot_eight(w + o * width, rows.data(), y + o, width, columns, rest);
            for (; o < std::min(outputs, start + BLOCK); o++)
                dot(w + o * width, rows.data() + i * columns, bias ? widen(bias[o]) : 0.0f, y + i * outputs + o, outputs, columns, rest,
                    o + 1 == outputs);
        }
}

inline void rms_norm(const float* x, const float* weight, float eps, float* y, long width) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < width; i++) squares += x[i] * x[i];
    const float scale = 1 / std::sqrt(squares / width + eps);
    for (long i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
}

// cos, sin [d] of one position, the first half of sin negated.
inline void rotate(float* x, const float* cos, const float* sin, long dim) {
    for (long i = 0, half = dim / 2; i < half; i++) {
        const float left = x[i], right = x[i + half];
        x[i] = left * cos[i] + right * sin[i];
        x[i + half] = right * cos[i + half] + left * sin[i + half];
    }
}

// exp of 8 numbers, to 2e-7 of each, 0 below -87: 2^k by the exponent's bits, times a polynomial in what is left of x.
inline __m256 exp(__m256 x) {
    const __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(-87), _CMP_NLT_UQ);
    x = _mm256_min_ps(_mm256_set1_ps(88), _mm256_max_ps(_mm256_set1_ps(-87), x));  // the second one where it is NaN
    const __m256 k = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm256_fnmadd_ps(k, _mm256_set1_ps(0.693359375f), x);
    x = _mm256_fnmadd_ps(k, _mm256_set1_ps(-2.12194440e-4f), x);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f})
        y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(c));
    const __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_cvtps_epi32(k), 23));
    return _mm256_and_ps(_mm256_castsi256_ps(scaled), keep);
}

// One query over T slots; sees: which of them, null = all. scores: room for T.
inline void attend(const float* q, const float* keys, const float* values, const bool* sees, long slots, long dim, float* scores,
                   float* y) {
    const float scale = 1 / std::sqrt(float(dim));
    float most = -INFINITY, total = 0;
    for (long t = 0; t < slots; t++) {
        float score = 0;
#pragma omp simd reduction(+ : score)
        for (long i = 0; i < dim; i++) score += q[i] * keys[t * dim + i];
        scores[t] = sees && !sees[t] ? -INFINITY : score * scale;
        most = std::max(most, scores[t]);
    }
    long first = 0;
    for (; first + 8 <= slots; first += 8)
        _mm256_storeu_ps(scores + first, exp(_mm256_sub_ps(_mm256_loadu_ps(scores + first), _mm256_set1_ps(most))));
    for (long t = first; t < slots; t++) scores[t] = std::exp(scores[t] - most);
    std::fill(y, y + dim, 0.0f);
    for (long t = 0; t < slots; t++) {
        total += scores[t];
        for (long i = 0; i < dim; i++) y[i] += scores[t] * values[t * dim + i];
    }
    for (long i = 0; i < dim; i++) y[i] /= total;
}

// gate <- silu(gate) * up
inline void silu_times(float* gate, const float* up, long count) {
    long i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256 x = _mm256_loadu_ps(gate + i), ones = _mm256_set1_ps(1);
        const __m256 sigmoid = _mm256_div_ps(ones, _mm256_add_ps(ones, exp(_mm256_sub_ps(_mm256_setzero_ps(), x))));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(_mm256_mul_ps(x, sigmoid), _mm256_loadu_ps(up + i)));
    }
    for (; i < count; i++) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
}

struct Sizes {
    long width, mlp_width, heads, kv_heads, head_dim;  // H, I, h, k, d
    float eps;
};

// Everything of a layer behind its queries, keys and values. Biases may be null.
struct Block {
    const uint16_t *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;  // [H,hd] [2I,H] [H,I]
    const float* mlp_norm;                                                       // [H]
};

// What the rows attend to: keys, values [k,T,d], their heads `stride` apart; sees [n,T], null = causally, the last row to all.
struct Slots {
    const float *keys, *values;
    long stride, count;
    const bool* sees;
};

// Shared by all threads: room for what they make together.
struct Room {
    Room(const Sizes& size, long n)
        : attended(n * size.heads * size.head_dim), gate_up(n * 2 * size.mlp_width), sum(n * size.width) {}
    std::vector<float> attended, gate_up, sum;
};

// state [n,H], this thread's own: the residual stream, from before the attention to behind the MLP. q: rows `q_stride` apart.
inline void block(const Sizes& size, const Block& weights, const Slots& slots, const float* q, long q_stride, long n, float* state,
                  Room& room) {
    const long width = size.width, mlp_width = size.mlp_width, heads = size.heads, dim = size.head_dim;
    static thread_local std::vector<float> scores, x;
    scores.resize(slots.count);
    x.resize(n * std::max(width, mlp_width));
    float *const sum = room.sum.data(), *const gate_up = room.gate_up.data(), *const attended = room.attended.data();
#pragma omp for schedule(static)
    for (long i = 0; i < n * heads; i++) {
        const long row = i / heads, head = i % heads, kv = head / (heads / size.kv_heads) * slots.stride;
        const bool* sees = slots.sees ? slots.sees + row * slots.count : nullptr;
        const long seen = sees ? slots.count : slots.count - (n - 1 - row);
        attend(q + row * q_stride + head * dim, slots.keys + kv, slots.values + kv, sees, seen, dim, scores.data(), attended + i * dim);
    }
    product(attended, weights.out, weights.out_bias, sum, n, heads * dim, width);
    for (long i = 0; i < n * width; i++) state[i] += sum[i];
    for (long i = 0; i < n; i++) rms_norm(state + i * width, weights.mlp_norm, size.eps, &x[i * width], width);
    product(x.data(), weights.gate_up, weights.gate_up_bias, gate_up, n, width, 2 * mlp_width);
    const long parts = (mlp_width + PART - 1) / PART;
#pragma omp for schedule(static)
    for (long i = 0; i < n * parts; i++) {
        const long from = i % parts * PART;
        float* gate = gate_up + i / parts * 2 * mlp_width + from;
        silu_times(gate, gate + mlp_width, std::min(PART, mlp_width - from));
    }
    for (long i = 0; i < n; i++) std::copy_n(gate_up + 2 * i * mlp_width, mlp_width, &x[i * mlp_width]);
    product(x.data(), weights.down, weights.down_bias, sum, n, mlp_width, width);
    for (long i = 0; i < n * width; i++) state[i] += sum[i];
}

}  // namespace thin

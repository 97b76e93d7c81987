// What a decoding step is made of, for its few rows n: weights in bf16, all else in fp32.
//
// A product y [n,O] = x [n,I] @ w [O,I]^T (+ bias [O]) is bound by memory: every weight is read from memory once, whatever n.
// With AVX-512 BF16 the processor multiplies pairs of bf16 numbers; x is rounded to bf16 then, as a model in bf16 does it, and each row's
// sums are added up in one order however many rows there are. With AVX2 bf16 is the upper half of fp32: of 16 weights in one register
// a shift gives the even columns and a mask the odd ones, so the even columns of each 16 of x are moved before the odd ones.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace thin {
namespace {  // else two libraries in one process, of different instructions, would share functions

#ifdef __AVX512BF16__
constexpr long LANES = 16;
constexpr long MOST = 7;  // rows of x that are multiplied at once,
constexpr long PAIR = 2;  // by so many rows of w: as many sums as there are registers for
using Input = uint16_t;   // what products read of x
#else
constexpr long LANES = 8;
constexpr long MOST = 8;
constexpr long PAIR = 1;
using Input = float;
#endif
using Floats = float __attribute__((vector_size(4 * LANES)));
using Bits = uint32_t __attribute__((vector_size(4 * LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * LANES)));

constexpr long GROUP = 2 * LANES;  // columns that one load of weights holds
constexpr long BLOCK = 32;         // rows of w that stay in the first cache while all rows of x pass
constexpr long PART = 256;         // columns of an MLP that a thread takes at once
constexpr long AHEAD = 6144;       // bytes: where a load of weights also asks for those to come

inline float widen(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

template <class Vector>
Vector load(const void* at) {
    Vector vector;
    std::memcpy(&vector, at, sizeof(vector));
    return vector;
}

template <class Vector>
void store(void* at, Vector vector) {
    std::memcpy(at, &vector, sizeof(vector));
}

#ifdef __AVX512BF16__
// LANES vectors, one behind the other -> their sums: neighbours are added up together, half the lanes at each level.
inline Floats sums(const Floats* v) {
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; i++) pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d left = _mm512_castps_pd(pairs[2 * i]), right = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)), _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
    }
    auto halves = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
    return halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]));
}

// One group of x, as products read it.
inline void convert(const float* x, Input* group) { store(group, _mm512_cvtne2ps_pbh(load<__m512>(x + LANES), load<__m512>(x))); }

// A group of x. Left alone, the compiler loads it anew for every row of weights, and loads are what there are too few of.
inline __m512i read(const Input* group) {
    __m512i own = load<__m512i>(group);
    asm("" : "+v"(own));
    return own;
}

// A group of weights times a group of x, added to the sums at `first` (and `second`: which may be the same).
inline void multiply(Bits weights, __m512i group, Floats& first, Floats&) { first = _mm512_dpbf16_ps(first, (__m512bh)weights, (__m512bh)group); }
#else
inline Floats sums(const Floats* v) {
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

inline void convert(const float* x, Input* group) {
    for (long k = 0; k < GROUP; k++) group[k % 2 * LANES + k / 2] = x[k];
}

struct Group {
    Floats even, odd;
};

inline Group read(const Input* group) { return {load<Floats>(group), load<Floats>(group + LANES)}; }

inline void multiply(Bits weights, Group group, Floats& first, Floats& second) {
    first += (Floats)(weights << 16) * group.even;
    second += (Floats)(weights & 0xffff0000u) * group.odd;
}
#endif

struct Window {
    uint16_t keep[2 * GROUP] = {};
    constexpr Window() {
        for (long i = 0; i < GROUP; i++) keep[i] = 0xffff;
    }
};
constexpr Window WINDOW;

// The first `count` of a group of weights, zeros behind. Behind the last row of all there is nothing to read.
inline Bits load_end(const uint16_t* w, long count, bool is_last) {
    if (is_last) {
        uint16_t end[GROUP] = {};
        std::memcpy(end, w, count * sizeof(uint16_t));
        return load<Bits>(end);
    }
    return load<Bits>(w) & load<Bits>(WINDOW.keep + GROUP - count);
}

template <bool ONCE>
inline Bits load_ahead(const uint16_t* w) {
    __builtin_prefetch(reinterpret_cast<const char*>(w) + AHEAD, 0, ONCE ? 0 : 3);
    return load<Bits>(w);
}

// ONCE: weights that are not read again while the last cache could hold them, as a target's: they pass it by, and leave it to the drafter.
//
// R rows of w against N rows of x, U groups at a time, in S = 1 or 2 sums each: R*N*U*S chains of additions hide the latency of one, and
// fit the registers. rest: columns of the last group, 1 to GROUP. is_last: nothing may be read behind the rows. What is still to be added
// up goes to totals [N,BLOCK].
template <bool ONCE, int R, int N, int U, int S>
void dot(const uint16_t* w, long width, const Input* x, Floats* totals, long columns, long rest, bool is_last) {
    Floats sums[U][S][R][N];
    for (auto& group : sums)
        for (auto& parity : group)
            for (auto& row : parity)
                for (auto& s : row) s = Floats{};
    auto add = [&](int u, long k, auto load_row) {
        Bits weights[R];
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) weights[r] = load_row(w + r * width + k, r);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const auto own = read(x + i * columns + k);
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) multiply(weights[r], own, sums[u][0][r][i], sums[u][S - 1][r][i]);
        }
    };
    auto whole_group = [](const uint16_t* at, int) { return load_ahead<ONCE>(at); };
    auto last_group = [&](const uint16_t* at, int r) { return load_end(at, rest, is_last && r + 1 == R); };
    const long whole = columns - (rest == GROUP ? 0 : GROUP);
    long k = 0;
    for (; k + U * GROUP <= whole; k += U * GROUP) {
#pragma GCC unroll 8
        for (int u = 0; u < U; u++) add(u, k + u * GROUP, whole_group);
    }
    for (; k < whole; k += GROUP) add(0, k, whole_group);
    if (k < columns) add(0, k, last_group);
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            Floats total = Floats{};
#pragma GCC unroll 8
            for (int u = 0; u < U; u++)
#pragma GCC unroll 2
                for (int parity = 0; parity < S; parity++) total += sums[u][parity][r][i];
            totals[i * BLOCK + r] = total;
        }
}

using Dot = void (*)(const uint16_t*, long, const Input*, Floats*, long, long, bool);
#ifdef __AVX512BF16__
template <bool ONCE, int R>
constexpr Dot DOTS[MOST] = {dot<ONCE, R, 1, 2, 1>, dot<ONCE, R, 2, 2, 1>, dot<ONCE, R, 3, 2, 1>, dot<ONCE, R, 4, 2, 1>,
                            dot<ONCE, R, 5, 2, 1>, dot<ONCE, R, 6, 2, 1>, dot<ONCE, R, 7, 2, 1>};
#else
template <bool ONCE, int R>
constexpr Dot DOTS[MOST] = {dot<ONCE, R, 1, 4, 2>, dot<ONCE, R, 2, 2, 2>, dot<ONCE, R, 3, 2, 2>, dot<ONCE, R, 4, 1, 2>,
                            dot<ONCE, R, 5, 1, 2>, dot<ONCE, R, 6, 1, 2>, dot<ONCE, R, 7, 1, 1>, dot<ONCE, R, 8, 1, 1>};
#endif

// The sums of `count` vectors, plus a bias that may be null.
inline void add_up(const Floats* totals, const uint16_t* bias, float* y, long count) {
    for (long o = 0; o < count; o += LANES) {
        const long some = std::min(LANES, count - o);
        float own[LANES] = {};
        for (long lane = 0; bias && lane < some; lane++) own[lane] = widen(bias[o + lane]);
        Floats total = sums(totals + o);
        if (bias) total += load<Floats>(own);
        if (some == LANES)
            store(y + o, total);
        else
            std::memcpy(y + o, &total, some * sizeof(float));
    }
}

// x [count, width] -> [count, columns] as products read it, zeros behind.
inline void convert(const float* x, Input* converted, long count, long width, long columns) {
    for (long i = 0; i < count; i++, x += width, converted += columns) {
        long k = 0;
        for (; k + GROUP <= width; k += GROUP) convert(x + k, converted + k);
        if (k < width) {
            float end[GROUP] = {};
            std::copy(x + k, x + width, end);
            convert(end, converted + k);
        }
    }
}

// What follows is called by all threads of a parallel region together. They share what products, attention and the MLP make, and have
// all of it on return; what is small (norms, sums) each computes for itself, which is cheaper than to wait for another.

// x: n rows of `width`; bias may be null.
template <bool ONCE>
void product(const float* x, const uint16_t* w, const uint16_t* bias, float* y, long n, long width, long outputs) {
    const long columns = (width + GROUP - 1) / GROUP * GROUP;
    const long rest = width - (columns - GROUP);
    static thread_local std::vector<Bits> room;  // vectors, for even addresses
    room.resize(n * columns * sizeof(Input) / sizeof(Bits));
    Input* const rows = reinterpret_cast<Input*>(room.data());
    convert(x, rows, n, width, columns);
    Floats totals[MOST * BLOCK];
#pragma omp for schedule(static)
    for (long start = 0; start < outputs; start += BLOCK) {
        const long count = std::min(BLOCK, outputs - start);
        for (long i = 0, some; i < n; i += some) {
            const long passes = (n - i + MOST - 1) / MOST;
            some = (n - i + passes - 1) / passes;
            for (long o = 0, r; o < count; o += r) {
                r = o + PAIR <= count ? PAIR : 1;
                const Dot dot = (r == 1 ? DOTS<ONCE, 1> : DOTS<ONCE, PAIR>)[some - 1];
                dot(w + (start + o) * width, width, rows + i * columns, totals + o, columns, rest, start + o + r == outputs);
            }
            for (long row = 0; row < some; row++) add_up(totals + row * BLOCK, bias ? bias + start : nullptr, y + (i + row) * outputs + start, count);
        }
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

// exp of each number, to 2e-7 of it, 0 below -87: 2^k by the exponent's bits, times a polynomial in what is left of x.
inline Floats exp(Floats x) {
    const Bits keep = (Bits)(x >= -87.0f);
    x = x > -87.0f ? x : Floats{} - 87.0f;  // also where it is NaN
    x = x < 88.0f ? x : Floats{} + 88.0f;
    constexpr float ROUND = 3 << 22;  // a sum with it has no digits behind the point
    const Floats shifted = x * 1.44269504f + ROUND, k = shifted - ROUND;
    x -= k * 0.693359375f;
    x -= k * -2.12194440e-4f;
    Floats y = Floats{} + 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f}) y = y * x + c;
    return (Floats)(((Bits)y + ((Bits)shifted << 23)) & keep);
}

// q [d] . keys [count,d] -> scores [LANES], the first `count` of which mean something.
ALWAYS_INLINE void score(const float* q, const float* keys, long count, long dim, float* scores) {
    const long whole = dim / LANES * LANES;
    Floats products[LANES];
    for (long t = 0; t < LANES; t += 4) {  // of so many the sums stay in registers
        const float* at[4];
        for (long o = 0; o < 4; o++) at[o] = keys + std::min(t + o, count - 1) * dim;
        Floats sum[4] = {};
        for (long i = 0; i < whole; i += LANES) {
            const Floats part = load<Floats>(q + i);
#pragma GCC unroll 4
            for (long o = 0; o < 4; o++) sum[o] += part * load<Floats>(at[o] + i);
        }
#pragma GCC unroll 4
        for (long o = 0; o < 4; o++) products[t + o] = sum[o];
    }
    store(scores, sums(products));
    for (long i = whole; i < dim; i++)
        for (long t = 0; t < count; t++) scores[t] += q[i] * keys[t * dim + i];
}

// Scores of `slots`, with room up to the next multiple of LANES -> their softmax, in place.
inline void softmax(float* scores, long slots, float scale) {
    long end = slots;
    for (; end % LANES; end++) scores[end] = -INFINITY;
    Floats most = load<Floats>(scores), total = Floats{};
    for (long t = LANES; t < end; t += LANES) {
        const Floats some = load<Floats>(scores + t);
        most = some > most ? some : most;
    }
    const float highest = *std::max_element(reinterpret_cast<float*>(&most), reinterpret_cast<float*>(&most) + LANES);
    for (long t = 0; t < end; t += LANES) {
        const Floats weight = exp((load<Floats>(scores + t) - highest) * scale);
        store(scores + t, weight);
        total += weight;
    }
    float sum = 0;
    for (long lane = 0; lane < LANES; lane++) sum += total[lane];
    for (long t = 0; t < end; t += LANES) store(scores + t, load<Floats>(scores + t) / sum);
}

// y [W registers] += weights [count] @ values [count,..], their rows `dim` apart. Two sums each: their additions do not wait for each other.
template <int W>
void add_weighted(const float* weights, const float* values, long count, long dim, float* y) {
    Floats even[W], odd[W];
    for (int i = 0; i < W; i++) even[i] = load<Floats>(y + i * LANES), odd[i] = Floats{};
    long t = 0;
    for (; t + 2 <= count; t += 2, values += 2 * dim)
#pragma GCC unroll 4
        for (int i = 0; i < W; i++) {
            even[i] += weights[t] * load<Floats>(values + i * LANES);
            odd[i] += weights[t + 1] * load<Floats>(values + dim + i * LANES);
        }
    for (int i = 0; i < W; i++) store(y + i * LANES, t < count ? even[i] + odd[i] + weights[t] * load<Floats>(values + i * LANES) : even[i] + odd[i]);
}

// Numbers in fp32: where they are, or widened into `room`.
inline const float* wide(const float* at, long, float*) { return at; }

inline const float* wide(const uint16_t* at, long count, float* room) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) __builtin_prefetch(reinterpret_cast<const char*>(at + i) + AHEAD), store(room + i, (Floats)(__builtin_convertvector(load<Halves>(at + i), Bits) << 16));
    for (; i < count; i++) room[i] = widen(at[i]);
    return room;
}

// The way back, rounded to the nearest, ties to even.
inline void narrow(const float* from, long count, float* to) { std::copy_n(from, count, to); }

inline void narrow(const float* from, long count, uint16_t* to) {
    for (long i = 0; i < count; i++) {
        uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        to[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}

// Room that attend needs.
inline long attention_room(long queries, long slots, long dim) { return BLOCK * dim + queries * (slots + LANES); }

// Keys and values [slots,d], fp32 or bf16; those from `split` on, a multiple of BLOCK, are in the other two.
template <class Number>
struct Stored {
    const Number *keys, *values;
    long slots, split;
    const Number *rest_keys, *rest_values;

    const Number* keys_at(long t, long dim) const { return t < split ? keys + t * dim : rest_keys + (t - split) * dim; }
    const Number* values_at(long t, long dim) const { return t < split ? values + t * dim : rest_values + (t - split) * dim; }
};

// q [queries,d], which share keys and values -> y [queries,d]. A few slots at a time pass through the first cache for all queries.
template <class Number>
ALWAYS_INLINE void attend_of(long dim, const float* q, long queries, const Stored<Number>& stored, float* room, float* y) {
    const long slots = stored.slots, stride = slots + LANES;
    float* const scores = room + BLOCK * dim;
    for (long t = 0; t < slots; t += LANES) {
        const long count = std::min(LANES, slots - t);
        const float* some = wide(stored.keys_at(t, dim), count * dim, room);
        for (long h = 0; h < queries; h++) score(q + h * dim, some, count, dim, scores + h * stride + t);
    }
    for (long h = 0; h < queries; h++) softmax(scores + h * stride, slots, 1 / std::sqrt(float(dim)));
    std::fill(y, y + queries * dim, 0.0f);
    for (long t = 0; t < slots; t += BLOCK) {
        const long count = std::min(BLOCK, slots - t);
        const float* some = wide(stored.values_at(t, dim), count * dim, room);
        for (long h = 0; h < queries; h++) {
            const float* const weights = scores + h * stride + t;
            float* const to = y + h * dim;
            long i = 0;
            for (; i + 4 * LANES <= dim; i += 4 * LANES) add_weighted<4>(weights, some + i, count, dim, to + i);
            for (; i + LANES <= dim; i += LANES) add_weighted<1>(weights, some + i, count, dim, to + i);
            for (long k = 0; k < count; k++)
                for (long j = i; j < dim; j++) to[j] += weights[k] * some[k * dim + j];
        }
    }
}

// The usual widths are known to the compiler, which unrolls what it knows.
template <class Number>
void attend(const float* q, long queries, const Stored<Number>& stored, long dim, float* room, float* y) {
    if (dim == 64) return attend_of(64, q, queries, stored, room, y);
    if (dim == 128) return attend_of(128, q, queries, stored, room, y);
    attend_of(dim, q, queries, stored, room, y);
}

// All of keys and values that a token sees. The slots behind the first that it does not see are moved together, into `rest`: so a token
// of a tree adds up what it sees in the order in which it would stand alone, and has the same state to the last bit.
inline Stored<float> seen_of(const float* keys, const float* values, const bool* sees, long slots, long dim, std::vector<float>& rest) {
    const long prefix = std::find(sees, sees + slots, false) - sees, split = prefix / BLOCK * BLOCK;
    const long count = std::count(sees + split, sees + slots, true);
    rest.resize(2 * count * dim);
    float* to = rest.data();
    for (const float* from : {keys, values})
        for (long t = split; t < slots; t++)
            if (sees[t]) to = std::copy_n(from + t * dim, dim, to);
    return {keys, values, split + count, split, rest.data(), rest.data() + count * dim};
}

// gate <- silu(gate) * up
inline void silu_times(float* gate, const float* up, long count) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats x = load<Floats>(gate + i);
        store(gate + i, x / (1 + exp(-x)) * load<Floats>(up + i));
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
template <bool ONCE>
void block(const Sizes& size, const Block& weights, const Slots& slots, const float* q, long q_stride, long n, float* state, Room& room) {
    const long width = size.width, mlp_width = size.mlp_width, heads = size.heads, dim = size.head_dim;
    static thread_local std::vector<float> own_room, own_x, rest;
    const long shared = heads / size.kv_heads;  // queries that share keys and values
    own_room.resize(attention_room(shared, slots.count, dim));
    own_x.resize(n * std::max(width, mlp_width));
    float* const x = own_x.data();
    float *const sum = room.sum.data(), *const gate_up = room.gate_up.data(), *const attended = room.attended.data();
#pragma omp for schedule(static)
    for (long i = 0; i < n * size.kv_heads; i++) {
        const long row = i % n, kv = i / n * slots.stride, head = i / n * shared;  // a thread reads the same keys for all rows
        const float *keys = slots.keys + kv, *values = slots.values + kv;
        const long causal = slots.count - (n - 1 - row);
        const Stored<float> stored = slots.sees ? seen_of(keys, values, slots.sees + row * slots.count, slots.count, dim, rest)
                                                : Stored<float>{keys, values, causal, causal, nullptr, nullptr};
        attend(q + row * q_stride + head * dim, shared, stored, dim, own_room.data(), attended + (row * heads + head) * dim);
    }
    product<ONCE>(attended, weights.out, weights.out_bias, sum, n, heads * dim, width);
    for (long i = 0; i < n * width; i++) state[i] += sum[i];
    for (long i = 0; i < n; i++) rms_norm(state + i * width, weights.mlp_norm, size.eps, &x[i * width], width);
    product<ONCE>(x, weights.gate_up, weights.gate_up_bias, gate_up, n, width, 2 * mlp_width);
    const long parts = (mlp_width + PART - 1) / PART;
#pragma omp for schedule(static)
    for (long i = 0; i < n * parts; i++) {
        const long from = i % parts * PART;
        float* gate = gate_up + i / parts * 2 * mlp_width + from;
        silu_times(gate, gate + mlp_width, std::min(PART, mlp_width - from));
    }
    for (long i = 0; i < n; i++) std::copy_n(gate_up + 2 * i * mlp_width, mlp_width, &x[i * mlp_width]);
    product<ONCE>(x, weights.down, weights.down_bias, sum, n, mlp_width, width);
    for (long i = 0; i < n * width; i++) state[i] += sum[i];
}

}  // namespace
}  // namespace thin

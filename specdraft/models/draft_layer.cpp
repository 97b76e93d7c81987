// The EAGLE-3 layer (eagle3_layer.py has its equations) over the few rows n of a drafting step: weights in bf16, all else in fp32.
// By torch a step is some ninety small kernels, which take longer than the weights take to be read; here it is two calls.
//
// Threads share what products and attention make; what is small (norms, sums) each of them computes for itself, which is cheaper
// than to wait for another. H width, I MLP width, h heads, k key/value heads, d head width, T slots.
#include <cmath>

#include "thin_products.h"

using std::vector;
using thin::widen;

struct DraftLayer {
    long width, mlp_width, heads, kv_heads, head_dim, norm_before_residual;
    float eps;
    const uint16_t *embedding, *qkv, *out, *gate_up, *down;                        // [V,H] [(h+2k)d,2H] [H,hd] [2I,H] [H,I]
    const float *embedding_norm, *hidden_norm, *mlp_norm, *last_norm;              // [H]
    const float *cos, *sin;                                                        // [positions,d]; the first half of sin negated
};

namespace {

void rms_norm(const float* x, const float* weight, float eps, float* y, long width) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < width; i++) squares += x[i] * x[i];
    const float scale = 1 / std::sqrt(squares / width + eps);
    for (long i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
}

void rotate(float* x, const float* cos, const float* sin, long dim) {
    for (long i = 0, half = dim / 2; i < half; i++) {
        const float left = x[i], right = x[i + half];
        x[i] = left * cos[i] + right * sin[i];
        x[i + half] = right * cos[i + half] + left * sin[i + half];
    }
}

// One query over T slots; sees: which of them, null = all. scores: room for T.
void attend(const float* q, const float* keys, const float* values, const bool* sees, long slots, long dim, float* scores, float* y) {
    const float scale = 1 / std::sqrt(float(dim));
    float most = -INFINITY, total = 0;
    for (long t = 0; t < slots; t++) {
        float score = 0;
#pragma omp simd reduction(+ : score)
        for (long i = 0; i < dim; i++) score += q[i] * keys[t * dim + i];
        scores[t] = sees && !sees[t] ? -INFINITY : score * scale;
        most = std::max(most, scores[t]);
    }
    std::fill(y, y + dim, 0.0f);
    for (long t = 0; t < slots; t++) {
        const float weight = std::exp(scores[t] - most);
        total += weight;
        for (long i = 0; i < dim; i++) y[i] += weight * values[t * dim + i];
    }
    for (long i = 0; i < dim; i++) y[i] /= total;
}

}  // namespace

// hidden [n,H], what the step reads, beside n tokens -> qkv [n,(h+2k)d], rotated by positions [n]; residual [n,H].
extern "C" void draft_project(const DraftLayer* layer, const float* hidden, const int64_t* tokens, const int64_t* positions, long n,
                              float* qkv, float* residual) {
    const long width = layer->width, dim = layer->head_dim, turned = layer->heads + layer->kv_heads;
    const long outputs = (turned + layer->kv_heads) * dim;
#pragma omp parallel
    {
        static thread_local vector<float> x, embedded;
        x.resize(n * 2 * width);
        embedded.resize(width);
        for (long i = 0; i < n; i++) {
            const uint16_t* row = layer->embedding + tokens[i] * width;
            for (long j = 0; j < width; j++) embedded[j] = widen(row[j]);
            float* normed = &x[(2 * i + 1) * width];
            rms_norm(embedded.data(), layer->embedding_norm, layer->eps, &x[2 * i * width], width);
            rms_norm(hidden + i * width, layer->hidden_norm, layer->eps, normed, width);
#pragma omp master
            std::copy_n(layer->norm_before_residual ? normed : hidden + i * width, width, residual + i * width);
        }
        thin::product(x.data(), layer->qkv, nullptr, qkv, n, 2 * width, outputs);
#pragma omp for schedule(static)
        for (long i = 0; i < n * turned; i++) {
            const long at = positions[i / turned] * dim;
            rotate(qkv + i / turned * outputs + i % turned * dim, layer->cos + at, layer->sin + at, dim);
        }
    }
}

// Queries q [n,hd], its rows `q_stride` apart, and residual [n,H] -> hidden, normed [n,H]: what the next step reads if it reads no
// normed state, and what the head reads. keys, values [k,T,d], their heads `kv_stride` apart; sees [n,T], null = all.
extern "C" void draft_finish(const DraftLayer* layer, const float* q, long q_stride, const float* residual, const float* keys,
                             const float* values, long kv_stride, long slots, const bool* sees, long n, float* hidden, float* normed) {
    const long width = layer->width, mlp_width = layer->mlp_width, heads = layer->heads, dim = layer->head_dim;
    static thread_local vector<float> attended, gate_up, added;
    attended.resize(n * heads * dim);
    gate_up.resize(n * 2 * mlp_width);
    added.resize(n * width);
    float *const of_heads = attended.data(), *const of_mlp = gate_up.data(), *const sum = added.data();
#pragma omp parallel
    {
        static thread_local vector<float> scores, state, x;
        scores.resize(slots);
        state.assign(residual, residual + n * width);
        x.resize(n * width);
#pragma omp for schedule(static)
        for (long i = 0; i < n * heads; i++) {
            const long row = i / heads, head = i % heads, kv = head / (heads / layer->kv_heads) * kv_stride;
            attend(q + row * q_stride + head * dim, keys + kv, values + kv, sees ? sees + row * slots : nullptr, slots, dim,
                   scores.data(), of_heads + i * dim);
        }
        thin::product(of_heads, layer->out, nullptr, sum, n, heads * dim, width);
        for (long i = 0; i < n * width; i++) state[i] += sum[i];
        for (long i = 0; i < n; i++) rms_norm(&state[i * width], layer->mlp_norm, layer->eps, &x[i * width], width);
        thin::product(x.data(), layer->gate_up, nullptr, of_mlp, n, width, 2 * mlp_width);
#pragma omp for schedule(static)
        for (long i = 0; i < n * mlp_width; i++) {
            float* row = of_mlp + i / mlp_width * 2 * mlp_width + i % mlp_width;
            *row *= row[mlp_width] / (1 + std::exp(-*row));
        }
        // the gated rows stand 2I apart: packed for the product
        static thread_local vector<float> gated;
        gated.resize(n * mlp_width);
        for (long i = 0; i < n; i++) std::copy_n(of_mlp + 2 * i * mlp_width, mlp_width, &gated[i * mlp_width]);
        thin::product(gated.data(), layer->down, nullptr, sum, n, mlp_width, width);
        for (long i = 0; i < n * width; i++) state[i] += sum[i];
#pragma omp master
        for (long i = 0; i < n; i++) {
            std::copy_n(&state[i * width], width, hidden + i * width);
            rms_norm(&state[i * width], layer->last_norm, layer->eps, normed + i * width, width);
        }
    }
}

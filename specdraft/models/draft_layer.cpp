// The EAGLE-3 layer (eagle3_layer.py has its equations) over the few rows n of a drafting step. By torch a step is some ninety small
// kernels, which take longer than the weights take to be read; here it is two calls.
#include "thin.h"

using std::vector;
using namespace thin;

struct DraftLayer {
    Sizes size;
    long norm_before_residual;
    const uint16_t *embedding, *qkv;                                           // [V,H] [(h+2k)d,2H]
    Block block;
    const float *embedding_norm, *hidden_norm, *last_norm;                     // [H]
    const float *cos, *sin;                                                    // [positions,d]
};

// hidden [n,H], what the step reads, beside n tokens -> qkv [n,(h+2k)d], rotated by positions [n]; residual [n,H].
extern "C" void draft_project(const DraftLayer* layer, const float* hidden, const int64_t* tokens, const int64_t* positions, long n,
                              float* qkv, float* residual) {
    const Sizes& size = layer->size;
    const long width = size.width, dim = size.head_dim, turned = size.heads + size.kv_heads, outputs = (turned + size.kv_heads) * dim;
#pragma omp parallel
    {
        vector<float> x(n * 2 * width), embedded(width);
        for (long i = 0; i < n; i++) {
            const uint16_t* row = layer->embedding + tokens[i] * width;
            for (long j = 0; j < width; j++) embedded[j] = widen(row[j]);
            float* normed = &x[(2 * i + 1) * width];
            rms_norm(embedded.data(), layer->embedding_norm, size.eps, &x[2 * i * width], width);
            rms_norm(hidden + i * width, layer->hidden_norm, size.eps, normed, width);
#pragma omp master
            std::copy_n(layer->norm_before_residual ? normed : hidden + i * width, width, residual + i * width);
        }
        product<false>(x.data(), layer->qkv, nullptr, qkv, n, 2 * width, outputs);
#pragma omp for schedule(static)
        for (long i = 0; i < n * turned; i++) {
            const long at = positions[i / turned] * dim;
            rotate(qkv + i / turned * outputs + i % turned * dim, layer->cos + at, layer->sin + at, dim);
        }
    }
}

// Queries q [n,hd], its rows `q_stride` apart, and residual [n,H] -> hidden, normed [n,H]: what the next step reads if it reads no
// normed state, and what the head reads. keys .. sees: see Slots.
extern "C" void draft_finish(const DraftLayer* layer, const float* q, long q_stride, const float* residual, const float* keys,
                             const float* values, long kv_stride, long slots, const bool* sees, long n, float* hidden, float* normed) {
    const long width = layer->size.width;
    Room room(layer->size, n);
#pragma omp parallel
    {
        vector<float> state(residual, residual + n * width);
        block<false>(layer->size, layer->block, {keys, values, kv_stride, slots, sees}, q, q_stride, n, state.data(), room);
#pragma omp master
        for (long i = 0; i < n; i++) {
            std::copy_n(&state[i * width], width, hidden + i * width);
            rms_norm(&state[i * width], layer->last_norm, layer->size.eps, normed + i * width, width);
        }
    }
}

// All layers of a Llama-like target (lean.py has them in torch) over the few rows n of a decoding step, in one call: threads meet
// six times a layer, and nothing else stands between one product and the next.
#include "thin.h"

using std::vector;
using namespace thin;

struct DecodeLayer {
    const uint16_t *qkv, *qkv_bias;              // [(h+2k)d,H]; bias null = none
    const float *input_norm, *q_norm, *k_norm;   // [H] [d] [d]; the last two null = none
    Block block;
};

// hidden [n,H] -> the last layer's output, in place; taps: for each layer where its input [n,H] goes, null = nowhere. cos, sin [n,d].
// keys, values: of each layer [k,slots,d], heads `kv_stride` apart; rows start..start+n are written. sees [n,start+n], null = causal.
extern "C" void decode_layers(const Sizes* sizes, const DecodeLayer* layers, long count, float* hidden, float* const* taps,
                              const float* cos, const float* sin, float* const* keys, float* const* values, long kv_stride, long start,
                              const bool* sees, long n) {
    const Sizes& size = *sizes;
    const long width = size.width, dim = size.head_dim, heads = size.heads, turned = heads + size.kv_heads;
    const long all = turned + size.kv_heads;
    Room room(size, n);
    vector<float> shared(n * all * dim);
    float* const qkv = shared.data();
#pragma omp parallel
    {
        vector<float> state(hidden, hidden + n * width), x(n * width);
        for (long l = 0; l < count; l++) {
            const DecodeLayer& layer = layers[l];
#pragma omp master
            if (taps[l]) std::copy(state.begin(), state.end(), taps[l]);
            for (long i = 0; i < n; i++) rms_norm(&state[i * width], layer.input_norm, size.eps, &x[i * width], width);
            product<true>(x.data(), layer.qkv, layer.qkv_bias, qkv, n, width, all * dim);
#pragma omp for schedule(static)
            for (long i = 0; i < n * all; i++) {
                const long row = i / all, head = i % all, slot = (start + row) * dim;
                float* of = qkv + i * dim;
                const float* norm = head < heads ? layer.q_norm : layer.k_norm;
                if (head < turned) {
                    if (norm) rms_norm(of, norm, size.eps, of, dim);
                    rotate(of, cos + row * dim, sin + row * dim, dim);
                }
                if (head >= heads) {
                    float* const to = head < turned ? keys[l] + (head - heads) * kv_stride : values[l] + (head - turned) * kv_stride;
                    std::copy_n(of, dim, to + slot);
                }
            }
            block<true>(size, layer.block, {keys[l], values[l], kv_stride, start + n, sees}, qkv, all * dim, n, state.data(), room);
        }
#pragma omp master
        std::copy(state.begin(), state.end(), hidden);
    }
}

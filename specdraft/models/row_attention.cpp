// Attention of a batch over a cache whose rows have different lengths: each row reads its own slots and no others.
#include "thin.h"

using namespace thin;

struct RowAttention {
    const int64_t* lengths;  // [B] slots of each row before its n new tokens, which see those and the new ones up to themselves
    long rows, n, heads, kv_heads, dim;
    long q_row, q_token;    // how many numbers lie between two rows of q, and between two tokens
    long kv_row, kv_head;   // and of keys and values: rows, heads
};

template <class Number>
void attend_rows(const RowAttention& a, const Number* q, const Number* keys, const Number* values, Number* y) {
    const long shared = a.heads / a.kv_heads, own = shared * a.dim;
#pragma omp parallel
    {
        std::vector<float> room, queries(own), out(own);
#pragma omp for schedule(dynamic)
        for (long i = 0; i < a.rows * a.kv_heads; i++) {
            const long row = i / a.kv_heads, kv = i % a.kv_heads, at = row * a.kv_row + kv * a.kv_head;
            for (long t = 0; t < a.n; t++) {
                const long slots = a.lengths[row] + t + 1;
                room.resize(attention_room(shared, slots, a.dim));
                const float* some = wide(q + row * a.q_row + t * a.q_token + kv * own, own, queries.data());
                attend(some, shared, Stored<Number>{keys + at, values + at, slots, slots, nullptr, nullptr}, a.dim, room.data(), out.data());
                narrow(out.data(), own, y + ((row * a.n + t) * a.heads + kv * shared) * a.dim);
            }
        }
    }
}

// q [B,n,h,d]; keys, values [B,k,T,d]; y [B,n,h,d]: fp32, or bf16.
extern "C" void attend_rows_fp32(const RowAttention* a, const float* q, const float* keys, const float* values, float* y) {
    attend_rows(*a, q, keys, values, y);
}

extern "C" void attend_rows_bf16(const RowAttention* a, const uint16_t* q, const uint16_t* keys, const uint16_t* values, uint16_t* y) {
    attend_rows(*a, q, keys, values, y);
}

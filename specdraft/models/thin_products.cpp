// One product of thin.h as a call of its own: see thin_products.py.
#include "thin.h"

constexpr long CACHED = 16 << 20;  // bytes of weights that a last cache may hold from one call to the next

extern "C" void thin_product(const float* x, const uint16_t* w, const uint16_t* bias, float* y, long n, long width, long outputs) {
    const auto product = outputs * width * long(sizeof(*w)) > CACHED ? thin::product<true> : thin::product<false>;
#pragma omp parallel
    product(x, w, bias, y, n, width, outputs);
}

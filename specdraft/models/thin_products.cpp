// One product of thin.h as a call of its own: see thin_products.py.
#include "thin.h"

extern "C" void thin_product(const float* x, const uint16_t* w, const uint16_t* bias, float* y, long n, long width, long outputs) {
#pragma omp parallel
    thin::product(x, w, bias, y, n, width, outputs);
}

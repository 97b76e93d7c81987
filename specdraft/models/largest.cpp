// What a tree wants to know of the logits of its nodes, and a live vocabulary of the target's: the few largest, and the sum of all
// exponentials. See thin_products.py.
#include "thin.h"

using namespace thin;

constexpr long PIECE = 512;  // columns whose maximum is kept

static float largest_of(const float* x, long count) {
    Floats most = Floats{} - INFINITY;
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats some = load<Floats>(x + i);
        most = some > most ? some : most;
    }
    float found = -INFINITY;
    for (long lane = 0; lane < LANES; lane++) found = std::max(found, most[lane]);
    for (; i < count; i++) found = std::max(found, x[i]);
    return found;
}

static float log_sum_exp(const float* x, long count, float top) {
    Floats total = Floats{};
    long i = 0;
    for (; i + LANES <= count; i += LANES) total += exp(load<Floats>(x + i) - top);
    float sum = 0;
    for (long lane = 0; lane < LANES; lane++) sum += total[lane];
    for (; i < count; i++) sum += std::exp(x[i] - top);
    return top + std::log(sum);
}

// logits [rows,columns] -> of each row the `count` largest, largest first, of equal ones the first; where they stand; and the log of the sum
// of all exponentials, unless log_total is null.
extern "C" void largest(const float* logits, long rows, long columns, long count, float* values, int64_t* places, float* log_total) {
#pragma omp parallel for if (rows > 1)
    for (long row = 0; row < rows; row++) {
        const float* const x = logits + row * columns;
        std::vector<float> most;  // of what is left of each piece
        for (long start = 0; start < columns; start += PIECE) most.push_back(largest_of(x + start, std::min(PIECE, columns - start)));
        if (log_total) log_total[row] = log_sum_exp(x, columns, *std::max_element(most.begin(), most.end()));
        int64_t* const taken = places + row * count;
        auto first_of = [&](long piece, long known) {  // place of the largest of a piece that is not taken, -1 = none
            long place = -1;
            for (long i = piece * PIECE; i < std::min((piece + 1) * PIECE, columns); i++)
                if ((place < 0 || x[i] > x[place]) && std::find(taken, taken + known, i) == taken + known) place = i;
            return place;
        };
        for (long k = 0; k < count; k++) {
            const long piece = std::max_element(most.begin(), most.end()) - most.begin();
            taken[k] = first_of(piece, k);
            values[row * count + k] = x[taken[k]];
            const long next = first_of(piece, k + 1);
            most[piece] = next < 0 ? -INFINITY : x[next];
        }
    }
}

// Slots of a cache that move, in the keys and values of all layers by one call: torch takes ten microseconds for each of them. See cache.py.
#include <cstdint>
#include <cstring>

struct Move {
    int64_t row, to, of;
};

// stored: `count` tensors [B,heads,slots,..], `size` bytes a slot. Moves are made in their order.
extern "C" void move_slots(char* const* stored, long count, long heads, long slots, long size, const Move* moves, long number) {
    for (long i = 0; i < count; i++)
        for (const Move* move = moves; move < moves + number; move++)
            for (long head = 0; head < heads; head++) {
                char* const from = stored[i] + (move->row * heads + head) * slots * size;
                std::memcpy(from + move->to * size, from + move->of * size, size);
            }
}

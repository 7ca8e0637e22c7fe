/* Groups of sixteen INT4 values looked up in tables of what NVFP4 makes of them. See int4_road.py for the tables.

   A group is eight bytes, two nibbles each, the low one first, in INT4 and in NVFP4 alike. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t v16 __attribute__((vector_size(16)));

/* The magnitude m of each nibble's value, nibble - 8, as a byte with its m lowest bits set: then OR is the maximum. */
static const v16 THERMOMETER = {0xff, 0x7f, 0x3f, 0x1f, 0x0f, 0x07, 0x03, 0x01,
                                0x00, 0x01, 0x03, 0x07, 0x0f, 0x1f, 0x3f, 0x7f};

static inline v16 look_up(v16 table, v16 index) {
#if defined(__GNUC__) && !defined(__clang__)
    return __builtin_shuffle(table, index);
#else
    v16 found;
    for (int i = 0; i < 16; i++) found[i] = table[index[i]];
    return found;
#endif
}

/* The even columns' nibbles, then the odd ones'. */
static inline v16 nibbles(const uint8_t *group) {
    uint64_t word, halves[2];
    memcpy(&word, group, 8);
    halves[0] = word & 0x0f0f0f0f0f0f0f0fULL;
    halves[1] = word >> 4 & 0x0f0f0f0f0f0f0f0fULL;
    v16 made;
    memcpy(&made, halves, 16);
    return made;
}

static inline unsigned level_of(v16 values) {
    uint64_t marks[2];
    v16 found = look_up(THERMOMETER, values);
    memcpy(marks, &found, 16);
    uint64_t all = marks[0] | marks[1];
    all |= all >> 32;
    all |= all >> 16;
    all |= all >> 8;
    return (unsigned)__builtin_popcount((unsigned)all & 0xff);
}

/* levels[i]: the largest magnitude, 0 to 8, of group i. */
void int4_levels(const uint8_t *halves, size_t groups, uint8_t *levels) {
    for (size_t i = 0; i < groups; i++) levels[i] = (uint8_t)level_of(nibbles(halves + 8 * i));
}

/* Each run of `per_scale` groups shares the scale bits[run]; row slots[bits] + level of codes and scales is theirs. */
void int4_pack(const uint8_t *halves, const uint16_t *bits, size_t runs, size_t per_scale, const int32_t *slots,
               const uint8_t *codes, const uint8_t *scales, uint8_t *packed, uint8_t *block_scales) {
    for (size_t run = 0; run < runs; run++) {
        size_t first = (size_t)slots[bits[run]];
        for (size_t i = run * per_scale; i < (run + 1) * per_scale; i++) {
            v16 values = nibbles(halves + 8 * i), table;
            size_t row = first + level_of(values);
            uint64_t found[2];
            memcpy(&table, codes + 16 * row, 16);
            v16 made = look_up(table, values);
            memcpy(found, &made, 16);
            found[0] |= found[1] << 4;
            memcpy(packed + 8 * i, found, 8);
            block_scales[i] = scales[row];
        }
    }
}

/* Groups of sixteen INT4 values looked up in tables of what NVFP4 makes of them. See int4_road.py for the tables.

   A group is eight bytes, two nibbles each, the low one first, in INT4 and in NVFP4 alike. Its level is the largest
   magnitude of its values, nibble - 8. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Groups whose levels are found at a time: in the first cache, with what is read and written. */
#define BATCH 64

typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef uint64_t u64x2 __attribute__((vector_size(16)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));

static inline u8x64 larger(u8x64 a, u8x64 b) {
    u8x64 mask = (u8x64)(a > b);
    return (a & mask) | (b & ~mask);
}

/* Of nibble - 8 and 8 - nibble, one is the magnitude; the other wraps around, if it is not the same. */
static inline u8x64 magnitudes(u8x64 nibbles) {
    u8x64 above = nibbles - 8, below = 8 - nibbles;
    u8x64 mask = (u8x64)(above < below);
    return (above & mask) | (below & ~mask);
}

/* Eight groups at once, each a word of eight bytes. */
static inline u8x8 levels_of_eight(u64x8 words) {
    const u64x8 low = {0x0f0f0f0f0f0f0f0fULL, 0x0f0f0f0f0f0f0f0fULL, 0x0f0f0f0f0f0f0f0fULL, 0x0f0f0f0f0f0f0f0fULL,
                       0x0f0f0f0f0f0f0f0fULL, 0x0f0f0f0f0f0f0f0fULL, 0x0f0f0f0f0f0f0f0fULL, 0x0f0f0f0f0f0f0f0fULL};
    u8x64 found = larger(magnitudes((u8x64)(words & low)), magnitudes((u8x64)(words >> 4 & low)));
    found = larger(found, (u8x64)((u64x8)found >> 32));
    found = larger(found, (u8x64)((u64x8)found >> 16));
    found = larger(found, (u8x64)((u64x8)found >> 8));
    return __builtin_convertvector((u64x8)found & 0xff, u8x8);
}

/* levels[i]: the level, 0 to 8, of group i. */
static inline void find_levels(const uint8_t *halves, size_t groups, uint8_t *levels) {
    size_t i = 0;
    u64x8 words = {0};
    for (; i + 8 <= groups; i += 8) {
        memcpy(&words, halves + 8 * i, 64);
        u8x8 found = levels_of_eight(words);
        memcpy(levels + i, &found, 8);
    }
    if (i < groups) {
        memcpy(&words, halves + 8 * i, 8 * (groups - i));
        u8x8 found = levels_of_eight(words);
        memcpy(levels + i, &found, groups - i);
    }
}

static inline u8x16 look_up(u8x16 table, u8x16 index) {
#if defined(__GNUC__) && !defined(__clang__)
    return __builtin_shuffle(table, index);
#else
    u8x16 found;
    for (int i = 0; i < 16; i++) found[i] = table[index[i]];
    return found;
#endif
}

/* The even columns' nibbles, then the odd ones'. */
static inline u8x16 nibbles(const uint8_t *group) {
    /* By shifts of a vector: two words stored and loaded as one make the processor wait. */
    const u64x2 shifts = {0, 4}, low = {0x0f0f0f0f0f0f0f0fULL, 0x0f0f0f0f0f0f0f0fULL};
    uint64_t word;
    memcpy(&word, group, 8);
    u64x2 both = {word, word};
    return (u8x16)(both >> shifts & low);
}

/* Each run of `per_scale` groups shares the scale bits[run]. tops[level]: the largest magnitude, as bits, of the scales
   of the runs of that level, and of what it held before; NaN is above all. */
void int4_tops(const uint8_t *halves, const uint16_t *bits, size_t runs, size_t per_scale, uint16_t *tops) {
    uint8_t levels[BATCH];
    size_t groups = runs * per_scale, run = 0, in_run = 0;
    unsigned level = 0;
    for (size_t first = 0; first < groups; first += BATCH) {
        size_t count = groups - first < BATCH ? groups - first : BATCH;
        find_levels(halves + 8 * first, count, levels);
        for (size_t i = 0; i < count; i++) {
            level = levels[i] > level ? levels[i] : level;
            if (++in_run < per_scale) continue;
            uint16_t magnitude = bits[run++] & 0x7fff;
            tops[level] = magnitude > tops[level] ? magnitude : tops[level];
            level = in_run = 0;
        }
    }
}

/* Row slots[bits[run]] + level of codes and scales is that of a group of the run. */
void int4_pack(const uint8_t *halves, const uint16_t *bits, size_t runs, size_t per_scale, const int32_t *slots,
               const uint8_t *codes, const uint8_t *scales, uint8_t *packed, uint8_t *block_scales) {
    uint8_t levels[BATCH];
    size_t groups = runs * per_scale, run = 0, in_run = 0;
    for (size_t first = 0; first < groups; first += BATCH) {
        size_t count = groups - first < BATCH ? groups - first : BATCH;
        find_levels(halves + 8 * first, count, levels);
        for (size_t i = first; i < first + count; i++) {
            size_t row = (size_t)slots[bits[run]] + levels[i - first];
            const u64x2 back = {0, 4};
            u8x16 table;
            memcpy(&table, codes + 16 * row, 16);
            u64x2 made = (u64x2)look_up(table, nibbles(halves + 8 * i)) << back;
            uint64_t both = made[0] | made[1];
            memcpy(packed + 8 * i, &both, 8);
            block_scales[i] = scales[row];
            if (++in_run == per_scale) in_run = 0, run++;
        }
    }
}

/* Groups of sixteen numbers as NVFP4, with the operations of ModelOpt's NVFP4QTensor in their order.

   Every operation is one IEEE float32 operation, as torch does it: compile without -ffast-math, and with
   -ffp-contract=off. A block is sixteen numbers of a row; it becomes eight bytes, the even column in the low nibble, and
   one e4m3 scale, which follows from the block's largest magnitude or is searched for. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* GCC would leave half of a vector unused. */
#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define GROUP 16
/* Blocks whose scales are made at a time: in the first cache, with what is read and written. */
#define BATCH 64

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));

static inline f32x16 load_bf16(const void *values, size_t block) {
    u16x16 bits;
    memcpy(&bits, (const uint16_t *)values + GROUP * block, sizeof bits);
    return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
}

static inline f32x16 load_f32(const void *values, size_t block) {
    f32x16 found;
    memcpy(&found, (const float *)values + GROUP * block, sizeof found);
    return found;
}

/* The largest magnitudes, as bits: those of finite numbers are in the order of the numbers. */
static inline float amax_bf16(const void *values, size_t block) {
    const uint16_t *bits = (const uint16_t *)values + GROUP * block;
    uint16_t largest = 0;
    for (int i = 0; i < GROUP; i++) {
        uint16_t magnitude = bits[i] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t wide = (uint32_t)largest << 16;
    float found;
    memcpy(&found, &wide, sizeof found);
    return found;
}

static inline float amax_f32(const void *values, size_t block) {
    uint32_t bits[GROUP], largest = 0;
    memcpy(bits, (const float *)values + GROUP * block, sizeof bits);
    for (int i = 0; i < GROUP; i++) {
        uint32_t magnitude = bits[i] & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    float found;
    memcpy(&found, &largest, sizeof found);
    return found;
}

/* The number of an e4m3 code below 127. */
static inline float from_e4m3(int32_t code) {
    uint32_t wide = ((uint32_t)code + (120u << 3)) << 20;
    float normal;
    memcpy(&normal, &wide, sizeof normal);
    return code < 8 ? (float)code * 0x1p-9f : normal;
}

/* The e4m3 code of a scale cut off to [2^-9, 448], to nearest, ties to even. */
static inline int32_t to_e4m3(float scale) {
    scale = scale < 0x1p-9f ? 0x1p-9f : scale;
    scale = scale > 448.0f ? 448.0f : scale;
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3);
    /* Below 2^-6 they are multiples of 2^-9; adding 1.5 * 2^23 rounds one to a whole number. */
    float whole = scale * 512.0f + 0x1.8p23f;
    memcpy(&bits, &whole, sizeof bits);
    return (int32_t)(scale < 0x1p-6f ? bits & 0xf : normal);
}

/* The scales of blocks from their largest magnitudes, and what the numbers are divided by. */
static inline void scales_of(const float *amaxes, size_t count, float shared, uint8_t *scales, float *divisors) {
    const float sixfold = 6.0f * shared;
    for (size_t i = 0; i < count; i++) {
        float scale = amaxes[i] / sixfold;
        int32_t code = to_e4m3(scale == 0.0f ? 1.0f : scale);
        scales[i] = (uint8_t)code;
        divisors[i] = from_e4m3(code) * shared;
    }
}

/* Searches take sixteen blocks at once, each with candidates of its own: magnitudes[i] holds the i-th number of each. */
#define LANES 16
typedef float Lanes[LANES];
typedef int32_t Codes[LANES];

/* What dividing by `divisors` loses in each block: the sum of the squared errors, in the order of the numbers. */
static inline void losses_of(Lanes *magnitudes, const float *divisors, float *losses) {
    Lanes inverse, sum;
    for (int k = 0; k < LANES; k++) inverse[k] = 1.0f / divisors[k], sum[k] = 0.0f;
    for (int i = 0; i < GROUP; i++)
        for (int k = 0; k < LANES; k++) {
            float scaled = magnitudes[i][k] * inverse[k];
            scaled = scaled < 6.0f ? scaled : 6.0f;
            /* Adding 1.5 * 2^22 times the power of two below it rounds a number to e2m1's steps: 0.5 up to 2, then 1, 2. */
            float floored = scaled < 1.0f ? 1.0f : scaled, shift;
            uint32_t bits;
            memcpy(&bits, &floored, sizeof bits);
            bits = (bits & 0x7f800000u) + ((22u << 23) | 0x400000u);
            memcpy(&shift, &bits, sizeof shift);
            float error = magnitudes[i][k] - ((scaled + shift) - shift) * divisors[k];
            sum[k] += error * error;
        }
    memcpy(losses, sum, sizeof sum);
}

/* The code with the smallest loss among all, the lower of equal ones; without one below infinity, the first. Those that cannot have it are left out:
   - above: where the largest number is at most 3.5 times the scale, half the scale has every step that this one uses;
     codes from 16 on are twice that of eight before;
   - below: where the largest number alone, cut off to 6 times the scale, loses more than what was found; two octaves
     below it loses more than a block does at the first code. */
static inline void search_all(Lanes *magnitudes, const float *amaxes, float shared, int32_t *best) {
    Lanes found, divisors, losses;
    Codes first;
    const float sixfold = 6.0f * shared;
    for (int k = 0; k < LANES; k++) best[k] = first[k] = to_e4m3(amaxes[k] / sixfold), found[k] = __builtin_inff();
    for (int32_t step = 0, any = 1; any; step++) {
        any = 0;
        for (int k = 0; k < LANES; k++) divisors[k] = from_e4m3(first[k] + step < 126 ? first[k] + step : 126) * shared;
        for (int k = 0; k < LANES; k++)
            any |= first[k] + step <= 126 && (first[k] + step < 16 || divisors[k] * 3.5f < amaxes[k]);
        if (!any) break;
        losses_of(magnitudes, divisors, losses);
        for (int k = 0; k < LANES; k++) {
            int32_t code = first[k] + step;
            int better = code <= 126 && (code < 16 || divisors[k] * 3.5f < amaxes[k]) && losses[k] < found[k];
            found[k] = better ? losses[k] : found[k];
            best[k] = better ? code : best[k];
        }
    }
    for (int32_t step = 1, any = 1; any && step <= 16; step++) {
        any = 0;
        for (int k = 0; k < LANES; k++) divisors[k] = from_e4m3(first[k] > step ? first[k] - step : 1) * shared;
        for (int k = 0; k < LANES; k++) {
            float over = amaxes[k] - 6.0f * divisors[k];
            any |= first[k] > step && !(over * over > found[k]);
        }
        if (!any) break;
        losses_of(magnitudes, divisors, losses);
        for (int k = 0; k < LANES; k++) {
            int better = first[k] > step && losses[k] <= found[k] && losses[k] < __builtin_inff();
            found[k] = better ? losses[k] : found[k];
            best[k] = better ? first[k] - step : best[k];
        }
    }
}

/* The better of two codes: of the scale that makes the largest number 6, and of the one that makes it 4. The shared
   scale is the weight's amax / (6 * 256), so that 1.5 times the largest block scale is there; multiplied, it is exact. */
static inline void search_two(Lanes *magnitudes, const float *amaxes, float shared, int32_t *best) {
    Lanes divisors, losses, others;
    Codes other;
    const float whole = shared * (6.0f * 256.0f) / 6.0f;
    for (int k = 0; k < LANES; k++) {
        float six = amaxes[k] / 6.0f, four = amaxes[k] * 1.5f / 6.0f;
        best[k] = to_e4m3((six == 0.0f ? 1.0f : six) * 256.0f / whole);
        other[k] = to_e4m3((four == 0.0f ? 1.0f : four) * 256.0f / whole);
    }
    for (int k = 0; k < LANES; k++) divisors[k] = from_e4m3(best[k]) * shared;
    losses_of(magnitudes, divisors, losses);
    for (int k = 0; k < LANES; k++) divisors[k] = from_e4m3(other[k]) * shared;
    losses_of(magnitudes, divisors, others);
    for (int k = 0; k < LANES; k++) best[k] = others[k] < losses[k] ? other[k] : best[k];
}

/* The nibbles: how many bounds a magnitude is not below; a tie goes to the even one. NaN (0 / 0, where a scale times the
   shared one underflows) is above all of them, as it is for torch.searchsorted. */
static inline void nibbles_of(f32x16 values, float divisor, uint8_t *packed) {
    f32x16 scaled = values / divisor;
    f32x16 sizes = (f32x16)((u32x16)scaled & 0x7fffffffu);
    i32x16 codes = ~(i32x16)(sizes <= 0.25f) + ~(i32x16)(sizes < 0.75f) + ~(i32x16)(sizes <= 1.25f) +
                   ~(i32x16)(sizes < 1.75f) + ~(i32x16)(sizes <= 2.5f) + ~(i32x16)(sizes < 3.5f) +
                   ~(i32x16)(sizes <= 5.0f);
    codes = -codes | ((i32x16)(scaled < 0.0f) & 8);
    u8x16 narrow = __builtin_convertvector(codes, u8x16);
    u16x8 pairs = (u16x8)narrow;
    u8x8 made = __builtin_convertvector(pairs | pairs >> 4, u8x8);
    memcpy(packed, &made, sizeof made);
}

/* What `search` says: none, all, or two. */
enum { MAX, MSE, FOUR_OVER_SIX };

#define PACK(name, load, amax)                                                                                      \
    static void name##_search(const void *values, size_t first, size_t count, const float *amaxes, float shared,    \
                              int search, uint8_t *scales, float *divisors) {                                       \
        for (size_t start = 0; start < count; start += LANES) {                                                     \
            Lanes magnitudes[GROUP] = {{0}}, largest = {0};                                                         \
            Codes best;                                                                                             \
            size_t lanes = count - start < LANES ? count - start : LANES;                                           \
            for (size_t k = 0; k < lanes; k++) {                                                                    \
                f32x16 block = load(values, first + start + k);                                                     \
                for (int i = 0; i < GROUP; i++) magnitudes[i][k] = __builtin_fabsf(block[i]);                       \
                largest[k] = amaxes[start + k];                                                                     \
            }                                                                                                       \
            if (search == MSE)                                                                                      \
                search_all(magnitudes, largest, shared, best);                                                      \
            else                                                                                                    \
                search_two(magnitudes, largest, shared, best);                                                      \
            for (size_t k = 0; k < lanes; k++) {                                                                    \
                scales[start + k] = (uint8_t)best[k];                                                               \
                divisors[start + k] = from_e4m3(best[k]) * shared;                                                  \
            }                                                                                                       \
        }                                                                                                           \
    }                                                                                                               \
                                                                                                                    \
    void name(const void *values, size_t blocks, float shared, int search, uint8_t *packed, uint8_t *scales) {      \
        float amaxes[BATCH], divisors[BATCH];                                                                       \
        for (size_t first = 0; first < blocks; first += BATCH) {                                                    \
            size_t count = blocks - first < BATCH ? blocks - first : BATCH;                                         \
            for (size_t i = 0; i < count; i++) amaxes[i] = amax(values, first + i);                                 \
            if (search == MAX)                                                                                      \
                scales_of(amaxes, count, shared, scales + first, divisors);                                         \
            else                                                                                                    \
                name##_search(values, first, count, amaxes, shared, search, scales + first, divisors);              \
            for (size_t i = 0; i < count; i++)                                                                      \
                nibbles_of(load(values, first + i), divisors[i], packed + (first + i) * (GROUP / 2));               \
        }                                                                                                           \
    }

PACK(nvfp4_pack_bf16, load_bf16, amax_bf16)
PACK(nvfp4_pack_f32, load_f32, amax_f32)

/* INT4: nibbles, two to a byte, the even column low, and a bf16 scale for each `per_scale` blocks. A value is
   (nibble - 8) * scale, rounded to bf16. */
void nvfp4_pack_int4(const uint8_t *halves, const uint16_t *bits, size_t blocks, size_t per_scale, float shared,
                     int search, uint8_t *packed, uint8_t *scales) {
    uint16_t values[BATCH * GROUP];
    size_t left = per_scale;
    for (size_t first = 0; first < blocks; first += BATCH) {
        size_t count = blocks - first < BATCH ? blocks - first : BATCH;
        for (size_t i = 0; i < count; i++) {
            u8x8 narrow;
            memcpy(&narrow, halves + (first + i) * (GROUP / 2), sizeof narrow);
            uint32_t wide = (uint32_t)*bits << 16;
            if (!--left) bits++, left = per_scale;
            float scale;
            memcpy(&scale, &wide, sizeof scale);
            i32x8 pairs = __builtin_convertvector(narrow, i32x8);
            u32x8 even = (u32x8)(__builtin_convertvector((pairs & 15) - 8, f32x8) * scale);
            u32x8 odd = (u32x8)(__builtin_convertvector((pairs >> 4) - 8, f32x8) * scale);
            even = (even + 0x7fff + (even >> 16 & 1)) >> 16;
            odd = (odd + 0x7fff + (odd >> 16 & 1)) & 0xffff0000u;
            even |= odd;
            memcpy(values + i * GROUP, &even, sizeof even);
        }
        nvfp4_pack_bf16(values, count, shared, search, packed + first * (GROUP / 2), scales + first);
    }
}

/* Groups of sixteen numbers as NVFP4, with the operations of ModelOpt's NVFP4QTensor in their order.

   Every operation is one IEEE float32 operation, as torch does it: do not compile with -ffast-math. A block is sixteen
   numbers of a row; it becomes eight bytes, the even column in the low nibble, and one e4m3 scale. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define GROUP 16
/* Blocks whose scales are made at a time: in the first cache, with what is read and written. */
#define BATCH 64

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
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

/* e4m3 of a scale in [2^-9, 448], to nearest, ties to even; and what the scaled numbers are divided by. */
static inline void scales_of(const float *amaxes, size_t count, float shared, uint8_t *scales, float *divisors) {
    const float sixfold = 6.0f * shared;
    for (size_t i = 0; i < count; i++) {
        float scale = amaxes[i] / sixfold;
        scale = scale == 0.0f ? 1.0f : scale;
        scale = scale < 0x1p-9f ? 0x1p-9f : scale;
        scale = scale > 448.0f ? 448.0f : scale;
        uint32_t bits;
        memcpy(&bits, &scale, sizeof bits);
        uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3);
        /* Below 2^-6 they are multiples of 2^-9; adding 1.5 * 2^23 rounds one to a whole number. */
        float whole = scale * 512.0f + 0x1.8p23f;
        memcpy(&bits, &whole, sizeof bits);
        uint32_t small = bits & 0xf, code = scale < 0x1p-6f ? small : normal;
        uint32_t wide = (code + (120u << 3)) << 20;
        float rounded;
        memcpy(&rounded, &wide, sizeof rounded);
        rounded = code < 8 ? (float)(int32_t)code * 0x1p-9f : rounded;
        scales[i] = (uint8_t)code;
        divisors[i] = rounded * shared;
    }
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

#define PACK(name, load, amax)                                                                                      \
    void name(const void *values, size_t blocks, float shared, uint8_t *packed, uint8_t *scales) {                  \
        float amaxes[BATCH], divisors[BATCH];                                                                       \
        for (size_t first = 0; first < blocks; first += BATCH) {                                                    \
            size_t count = blocks - first < BATCH ? blocks - first : BATCH;                                         \
            for (size_t i = 0; i < count; i++) amaxes[i] = amax(values, first + i);                                 \
            scales_of(amaxes, count, shared, scales + first, divisors);                                             \
            for (size_t i = 0; i < count; i++)                                                                      \
                nibbles_of(load(values, first + i), divisors[i], packed + (first + i) * (GROUP / 2));               \
        }                                                                                                           \
    }

PACK(nvfp4_pack_bf16, load_bf16, amax_bf16)
PACK(nvfp4_pack_f32, load_f32, amax_f32)

/* Vectors of floats and the operations that all files use. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define VECS 2      /* vectors in a panel of weights */
#define MAX_ROWS 12 /* rows of a tile: the accumulators and operands fill the registers */
#elif defined(__AVX2__)
#define LANES 8
#define VECS 2
#define MAX_ROWS 6
#else
#define LANES 4
#define VECS 4
#define MAX_ROWS 8
#endif
#define PANEL (LANES * VECS) /* outputs computed together */
#define MAGIC 12582912.0f    /* 1.5 * 2^23: adding it to a small number rounds to an integer */
#define ALWAYS static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

#if defined(__aarch64__)
#define MULTIPLY_ADD(sums, a, b, lane) /* sums + a * b[lane]; the lane is a constant */ \
    ((lane) == 0   ? vfmaq_laneq_f32(sums, a, b, 0)                                     \
     : (lane) == 1 ? vfmaq_laneq_f32(sums, a, b, 1)                                     \
     : (lane) == 2 ? vfmaq_laneq_f32(sums, a, b, 2)                                     \
                   : vfmaq_laneq_f32(sums, a, b, 3))
#endif

ALWAYS vec load(const float *p) { return *(const loose *)p; }
ALWAYS void store(float *p, vec v) { *(loose *)p = v; }
ALWAYS vec splat(float x) { return x - (vec){0}; }

/* a * b + c with one rounding where the CPU has such an instruction. The compiler must not choose:
   it fuses the same expression in one place and not in another (see FLAGS in build.py), and then a
   row would get other bits in another batch. */
#if defined(__AVX512F__)
ALWAYS vec multiply_add(vec a, vec b, vec c) {
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__AVX2__) && defined(__FMA__)
ALWAYS vec multiply_add(vec a, vec b, vec c) {
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#elif defined(__aarch64__)
ALWAYS vec multiply_add(vec a, vec b, vec c) {
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
ALWAYS vec multiply_add(vec a, vec b, vec c) { return a * b + c; }
#endif

ALWAYS vec either(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }
#if defined(__AVX512F__)
ALWAYS vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
ALWAYS vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
#elif defined(__aarch64__)
ALWAYS vec larger(vec a, vec b) { return (vec)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b); }
#else
ALWAYS vec larger(vec a, vec b) { return either(a > b, a, b); }
#endif

/* Rotate the lanes by a number of places. */
#define TWO(j) (j) % LANES, ((j) + 1) % LANES
#define EIGHT(j) TWO(j), TWO(j + 2), TWO(j + 4), TWO(j + 6)
#if LANES == 16
#define TURN(v, by) __builtin_shufflevector(v, v, EIGHT(by), EIGHT(by + 8))
#elif LANES == 8
#define TURN(v, by) __builtin_shufflevector(v, v, EIGHT(by))
#else
#define TURN(v, by) __builtin_shufflevector(v, v, TWO(by), TWO(by + 2))
#endif

ALWAYS float sum(vec v) {
    if (LANES > 8) v += TURN(v, 8);
    if (LANES > 4) v += TURN(v, 4);
    v += TURN(v, 2);
    v += TURN(v, 1);
    return v[0];
}

ALWAYS float largest(vec v) {
    if (LANES > 8) v = larger(v, TURN(v, 8));
    if (LANES > 4) v = larger(v, TURN(v, 4));
    v = larger(v, TURN(v, 2));
    v = larger(v, TURN(v, 1));
    return v[0];
}

/* Fold the lanes of a and b onto half as many: every 2 * half lanes hold a's, then b's. */
#define AT(j, half, by) ((j) % (2 * (half)) < (half) ? (j) : (j) - (half) + LANES) + by
#define FOUR(j, half, by) AT(j, half, by), AT(j + 1, half, by), AT(j + 2, half, by), AT(j + 3, half, by)
#if LANES == 16
#define ALL(half, by) FOUR(0, half, by), FOUR(4, half, by), FOUR(8, half, by), FOUR(12, half, by)
#elif LANES == 8
#define ALL(half, by) FOUR(0, half, by), FOUR(4, half, by)
#else
#define ALL(half, by) FOUR(0, half, by)
#endif
#define FOLD(half)                                                                          \
    for (int i = 0; i < half; i++)                                                          \
        v[i] = join(__builtin_shufflevector(v[i], v[i + half], ALL(half, 0)),               \
                    __builtin_shufflevector(v[i], v[i + half], ALL(half, half)));

/* The lanes of each of LANES vectors joined to one number, all together as one vector. */
ALWAYS vec fold(vec v[LANES], vec (*join)(vec, vec)) {
#if LANES == 16
#pragma GCC unroll 8
    FOLD(8)
#endif
#if LANES >= 8
#pragma GCC unroll 8
    FOLD(4)
#endif
#pragma GCC unroll 8
    FOLD(2)
    FOLD(1)
    return v[0];
}

ALWAYS vec plus(vec a, vec b) { return a + b; }
ALWAYS vec plus_integers(vec a, vec b) { return (vec)((ivec)a + (ivec)b); }

/* The sums over the lanes of LANES vectors, as one vector. */
ALWAYS vec sums_of(vec v[LANES]) {
#if defined(__aarch64__)
    const float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    return (vec)vpaddq_f32(low, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]));
#else
    return fold(v, plus);
#endif
}

/* e^x to about one unit in the last place; 0 below e^-87, so that a masked score has weight 0. */
ALWAYS vec exponential(vec x) {
    ivec vanishes = x < splat(-87.0f);
    vec t = larger(either(x < splat(88.0f), x, splat(88.0f)), splat(-87.0f));
    vec biased = multiply_add(t, splat(1.44269504f), splat(MAGIC)), whole = biased - MAGIC;
    vec r = multiply_add(whole, splat(-0.693359375f), t);
    r = multiply_add(whole, splat(2.12194440e-4f), r);
    vec p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    ivec power = ((ivec)biased << 23) + (127 << 23); /* the low bits of `biased` are the integer */
    return (vec)((ivec)(p * (vec)power) & ~vanishes);
}

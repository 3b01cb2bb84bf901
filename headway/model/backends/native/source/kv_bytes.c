/* Keys and values in 8 bits.

   A row (one token's key or value of one head) is rounded to scale * i, with i of 8 bits, when it is
   stored: D integers, then the scale as a float32. Queries, and the weights of a tile of values, are
   rounded in the same way to 16 bits. A product of both is then an integer, exact in any order of
   addition, times two scales. */

#define SCALE_BYTES 4
#define MAX_BYTE 127.0f
#define MAX_ROUNDED 32639.0f /* 127 * 256 + 127; times 127 * MAX_HEAD it is below 2^31 */
#define TINY 1e-30f          /* numbers below it count as zeros */
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define DOTS LANES /* keys that are multiplied together */
#else
#define DOTS 4
#endif

ALWAYS vec size_of(vec v) { return (vec)((ivec)v & 0x7fffffff); }

/* The largest absolute value of n numbers; n is a multiple of LANES. */
ALWAYS float largest_size(const float *x, int64_t n) {
    vec most[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) most[v] = larger(size_of(load(x + i + v * LANES)), most[v]);
    for (; i < n; i += LANES) most[0] = larger(size_of(load(x + i)), most[0]);
    return largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

static void store_bytes(const float *restrict x, int64_t D, char *restrict to) {
    const float top = largest_size(x, D), inverse = top > TINY ? MAX_BYTE / top : 0;
    const float scale = top > TINY ? top / MAX_BYTE : 0;
    int8_t *row = (int8_t *)to;
#if defined(__AVX512F__)
    for (int64_t d = 0; d < D; d += LANES) {
        const vec biased = load(x + d) * inverse + MAGIC;
        _mm_storeu_si128((__m128i *)(row + d), _mm512_cvtepi32_epi8((__m512i)biased));
    }
#else
    for (int64_t d = 0; d < D; d++) row[d] = (int8_t)(int32_t)rintf(x[d] * inverse);
#endif
    memcpy(to + D, &scale, SCALE_BYTES);
}

ALWAYS float scale_of(const char *row, int64_t D) {
    float scale;
    memcpy(&scale, row + D, SCALE_BYTES);
    return scale;
}

/* Numbers scale * i of 16 bits; for dot products of bytes in two parts, i = 256 high + low. */
typedef struct {
#if defined(__ARM_FEATURE_DOTPROD)
    int8_t high[MAX_HEAD], low[MAX_HEAD];
#else
    int16_t whole[MAX_HEAD];
#endif
    float scale;
} Rounded;

ALWAYS int32_t whole_of(const Rounded *x, int64_t n) {
#if defined(__ARM_FEATURE_DOTPROD)
    return x->high[n] * 256 + x->low[n];
#else
    return x->whole[n];
#endif
}

/* Round n numbers; n is a multiple of LANES. */
static void round_all(const float *restrict x, int64_t n, Rounded *restrict to) {
    const float top = largest_size(x, n), inverse = top > TINY ? MAX_ROUNDED / top : 0;
    to->scale = top > TINY ? top / MAX_ROUNDED : 0;
#if defined(__AVX512F__)
    for (int64_t k = 0; k < n; k += LANES) {
        const vec biased = load(x + k) * inverse + MAGIC;
        _mm256_storeu_si256((__m256i *)(to->whole + k), _mm512_cvtepi32_epi16((__m512i)biased));
    }
#else
    for (int64_t k = 0; k < n; k++) {
        const int32_t i = (int32_t)rintf(x[k] * inverse);
#if defined(__ARM_FEATURE_DOTPROD)
        const int32_t high = (i + 128) >> 8;
        to->high[k] = (int8_t)high, to->low[k] = (int8_t)(i - high * 256);
#else
        to->whole[k] = (int16_t)i;
#endif
    }
#endif
}

#if defined(__ARM_FEATURE_DOTPROD)
ALWAYS int32x4_t four_sums(const int32x4_t v[4]) {
    return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}

/* The dot products of a query and four keys. */
ALWAYS void dots_of(const Rounded *q, const char *const *keys, int64_t D, int32_t out[4]) {
    int32x4_t high[4], low[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) high[i] = low[i] = vdupq_n_s32(0);
    int64_t d = 0;
    for (; d + 16 <= D; d += 16) {
        const int8x16_t upper = vld1q_s8(q->high + d), lower = vld1q_s8(q->low + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int8x16_t key = vld1q_s8((const int8_t *)keys[i] + d);
            high[i] = vdotq_s32(high[i], upper, key);
            low[i] = vdotq_s32(low[i], lower, key);
        }
    }
    vst1q_s32(out, vaddq_s32(vshlq_n_s32(four_sums(high), 8), four_sums(low)));
    for (; d < D; d++)
        for (int i = 0; i < 4; i++) out[i] += whole_of(q, d) * ((const int8_t *)keys[i])[d];
}

/* Bytes [d, d + 16) of four rows, with the four bytes of a place next to each other. */
ALWAYS void interleave(const char *const *rows, int64_t d, int8_t to[64]) {
    int8x16_t x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = vld1q_s8((const int8_t *)rows[i] + d);
    const int8x16x2_t even = vzipq_s8(x[0], x[2]), odd = vzipq_s8(x[1], x[3]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const int8x16x2_t all = vzipq_s8(even.val[i], odd.val[i]);
        vst1q_s8(to + 32 * i, all.val[0]), vst1q_s8(to + 32 * i + 16, all.val[1]);
    }
}

#define ADD_FOUR(lane)                                                                  \
    for (int v = 0; v < 4; v++) {                                                       \
        const int8x16_t value = vld1q_s8(mixed + (first / 4 + lane) * 64 + 16 * v);     \
        for (int r = 0; r < rows; r++) {                                                \
            high[r][v] = vdotq_laneq_s32(high[r][v], value, upper[r], lane);            \
            low[r][v] = vdotq_laneq_s32(low[r][v], value, lower[r], lane);              \
        }                                                                               \
    }

/* Add `count` interleaved values, times the weights, to 16 places of some rows of the output. */
ALWAYS void add_mixed(const int rows, const Rounded *weights, const int8_t *mixed, int count,
                      int64_t d, float (*out)[MAX_HEAD]) {
    int32x4_t high[2][4], low[2][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) high[r][v] = low[r][v] = vdupq_n_s32(0);
    for (int first = 0; first < count; first += 16) {
        int8x16_t upper[2], lower[2];
        for (int r = 0; r < rows; r++)
            upper[r] = vld1q_s8(weights[r].high + first), lower[r] = vld1q_s8(weights[r].low + first);
        ADD_FOUR(0) ADD_FOUR(1) ADD_FOUR(2) ADD_FOUR(3)
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) {
            const int32x4_t sum = vaddq_s32(vshlq_n_s32(high[r][v], 8), low[r][v]);
            float *to = out[r] + d + 4 * v;
            store(to, multiply_add((vec)vcvtq_f32_s32(sum), splat(weights[r].scale), load(to)));
        }
}

/* Places [0, D / 16 * 16) of the output of `add_values`. Returns the number of places. */
ALWAYS int64_t add_many(const Rounded *weights, int rows, const char *const *values, int count,
                        int64_t D, float (*out)[MAX_HEAD]) {
    int64_t d = 0;
    for (; d + 16 <= D; d += 16) {
        int8_t mixed[KEYS * 16];
        for (int j = 0; j < count; j += 16)
            for (int i = j; i < j + 16; i += 4) interleave(values + i, d, mixed + i * 16);
        int r = 0;
        for (; r + 2 <= rows; r += 2) add_mixed(2, weights + r, mixed, count, d, out + r);
        if (r < rows) add_mixed(1, weights + r, mixed, count, d, out + r);
    }
    return d;
}
#elif DOTS == LANES && DOTS > 4
/* Vectors of 2 * LANES integers of 16 bits: of bytes that are neighbours, or pairs of bytes of two rows. */
#if defined(__AVX512BW__)
typedef __m512i words;
ALWAYS words load_words(const void *p) { return _mm512_loadu_si512(p); }
ALWAYS words widen(const char *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
ALWAYS words pair(const char *a, const char *b) {
    const __m128i x = _mm_loadu_si128((const __m128i *)a), y = _mm_loadu_si128((const __m128i *)b);
    return _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y)));
}
ALWAYS words repeat(int32_t pair) { return _mm512_set1_epi32(pair); }
#if defined(__AVX512VNNI__)
ALWAYS ivec add_products(ivec sums, words a, words b) {
    return (ivec)_mm512_dpwssd_epi32((__m512i)sums, a, b);
}
#else
ALWAYS ivec add_products(ivec sums, words a, words b) { return sums + (ivec)_mm512_madd_epi16(a, b); }
#endif
#else
typedef __m256i words;
ALWAYS words load_words(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
ALWAYS words widen(const char *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
ALWAYS words pair(const char *a, const char *b) {
    const __m128i x = _mm_loadl_epi64((const __m128i *)a), y = _mm_loadl_epi64((const __m128i *)b);
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y));
}
ALWAYS words repeat(int32_t pair) { return _mm256_set1_epi32(pair); }
ALWAYS ivec add_products(ivec sums, words a, words b) { return sums + (ivec)_mm256_madd_epi16(a, b); }
#endif

/* The dot products of a query and LANES keys. */
ALWAYS void dots_of(const Rounded *q, const char *const *keys, int64_t D, int32_t out[LANES]) {
    ivec sums[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) sums[i] = (ivec){0};
    int64_t d = 0;
    for (; d + 2 * LANES <= D; d += 2 * LANES) {
        const words part = load_words(q->whole + d);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] = add_products(sums[i], part, widen(keys[i] + d));
    }
    const vec folded = fold((vec *)sums, plus_integers);
    memcpy(out, &folded, sizeof folded);
    for (; d < D; d++)
        for (int i = 0; i < LANES; i++) out[i] += whole_of(q, d) * ((const int8_t *)keys[i])[d];
}

/* Add `count` pairs of values, times the weights, to LANES places of some rows of the output. */
ALWAYS void add_pairs(const int rows, const Rounded *weights, const words *pairs, int count, int64_t d,
                      float (*out)[MAX_HEAD]) {
    ivec sums[4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sums[r] = (ivec){0};
    for (int j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, weights[r].whole + 2 * j, sizeof both);
            sums[r] = add_products(sums[r], pairs[j], repeat(both));
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        store(out[r] + d, multiply_add(__builtin_convertvector(sums[r], vec),
                                       splat(weights[r].scale), load(out[r] + d)));
}

ALWAYS int64_t add_many(const Rounded *weights, int rows, const char *const *values, int count,
                        int64_t D, float (*out)[MAX_HEAD]) {
    for (int64_t d = 0; d < D; d += LANES) {
        words pairs[KEYS / 2];
        const int num_pairs = (count + 1) / 2;
        for (int j = 0; j < num_pairs; j++) pairs[j] = pair(values[2 * j] + d, values[2 * j + 1] + d);
        int r = 0;
        for (; r + 4 <= rows; r += 4) add_pairs(4, weights + r, pairs, num_pairs, d, out + r);
        for (; r < rows; r++) add_pairs(1, weights + r, pairs, num_pairs, d, out + r);
    }
    return D;
}
#else
ALWAYS void dots_of(const Rounded *q, const char *const *keys, int64_t D, int32_t out[DOTS]) {
    for (int i = 0; i < DOTS; i++) {
        int32_t sum = 0;
        for (int64_t d = 0; d < D; d++) sum += q->whole[d] * ((const int8_t *)keys[i])[d];
        out[i] = sum;
    }
}

ALWAYS int64_t add_many(const Rounded *weights, int rows, const char *const *values, int count,
                        int64_t D, float (*out)[MAX_HEAD]) {
    (void)weights, (void)rows, (void)values, (void)count, (void)D, (void)out;
    return 0;
}
#endif

/* The scores of `count` keys. In both functions, the rows of a tile after `count` are readable. */
static void score_bytes(const Rounded *q, const char *const *keys, int count, int64_t D, float scale,
                        float *out) {
    const float factor = q->scale * scale;
    for (int first = 0; first < count; first += DOTS) {
        int32_t dots[DOTS];
        dots_of(q, keys + first, D, dots);
        for (int i = 0; i < DOTS; i++)
            out[first + i] = (float)dots[i] * (factor * scale_of(keys[first + i], D));
    }
}

/* out[rows, D] += weights[rows, count] values. The weights are changed. */
static void add_values(float (*weights)[KEYS], int rows, const char *const *values, int count,
                       int64_t D, float (*out)[MAX_HEAD]) {
    float scales[KEYS] = {0};
    Rounded rounded[MAX_QUERIES];
    for (int j = 0; j < count; j++) scales[j] = scale_of(values[j], D);
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < KEYS; j++) weights[r][j] *= scales[j];
        round_all(weights[r], KEYS, &rounded[r]);
    }
    const int64_t done = add_many(rounded, rows, values, count, D, out);
    if (done == D) return;
    for (int r = 0; r < rows; r++) {
        int32_t sums[MAX_HEAD] = {0};
        for (int j = 0; j < count; j++) {
            const int32_t weight = whole_of(&rounded[r], j);
            for (int64_t d = done; d < D; d++) sums[d] += weight * ((const int8_t *)values[j])[d];
        }
        for (int64_t d = done; d < D; d += LANES) {
            ivec sum;
            memcpy(&sum, sums + d, sizeof sum);
            store(out[r] + d, multiply_add(__builtin_convertvector(sum, vec),
                                           splat(rounded[r].scale), load(out[r] + d)));
        }
    }
}

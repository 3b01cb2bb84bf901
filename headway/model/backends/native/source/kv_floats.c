/* Keys and values in floats: scores of a tile of keys, and sums of their values. */

/* Positions per tile of keys; tiles start at position 0 of the sequence. Two tiles of keys and values
   fit in the first cache. */
#define KEYS (LANES == 4 ? 32 : 64)
#define MAX_QUERIES 32
#define MAX_HEAD 256
#if LANES == 4
#define SCORED 4 /* rows that share the loads of keys; their sums fit in the registers */
#else
#define SCORED 1
#endif

static const float nothing[MAX_HEAD]; /* a row of zeros, as floats or as bytes with a scale */

/* out[rows, count] = scale q keys, where `keys` has a multiple of LANES places. Prefetches the keys at
   `later`, if it is not 0, a line at a time: many at once would fill the queues of the cache. */
ALWAYS void score(const int rows, const float *const *q, const char *const *keys,
                  const char *const *later, int count, int64_t D, float scale, float (*out)[KEYS]) {
    for (int first = 0; first < count; first += LANES) {
        vec sums[SCORED][LANES];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) sums[r][i] = (vec){0};
        for (int64_t d = 0; d < D; d += LANES) {
            if (later)
                for (int64_t line = d * LANES / 16; line < (d + LANES) * LANES / 16; line++)
                    __builtin_prefetch(later[first + line % LANES] + line / LANES * 64);
            vec parts[SCORED];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) parts[r] = load(q[r] + d);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const vec key = load((const float *)keys[first + i] + d);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) sums[r][i] = multiply_add(parts[r], key, sums[r][i]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) store(out[r] + first, sums_of(sums[r]) * scale);
    }
}

/* `score` for up to SCORED rows. */
static void score_some(int rows, const float *const *q, const char *const *keys,
                       const char *const *later, int count, int64_t D, float scale,
                       float (*out)[KEYS]) {
    switch (rows) {
    case 1: score(1, q, keys, later, count, D, scale, out); break;
#if SCORED > 1
    case 2: score(2, q, keys, later, count, D, scale, out); break;
    case 3: score(3, q, keys, later, count, D, scale, out); break;
    case 4: score(4, q, keys, later, count, D, scale, out); break;
#endif
    }
}

/* out[rows, D] += weights[rows, from:to] values, a few vectors of D at a time; the values are
   `offset` bytes after the keys. Prefetches like `score`. */
ALWAYS void gather(const int rows, const int vecs, float (*weights)[KEYS], const char *const *keys,
                   const char *const *later, int64_t offset, int from, int to, float (*out)[MAX_HEAD]) {
    vec sums[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sums[r][v] = load(out[r] + v * LANES);
    int j = from;
#if defined(__aarch64__)
    for (; j + 4 <= to; j += 4) {
        float32x4_t four[4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) four[r] = vld1q_f32(weights[r] + j);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            if (later) __builtin_prefetch(later[j + i] + offset);
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) {
                const float32x4_t value = vld1q_f32((const float *)(keys[j + i] + offset) + v * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sums[r][v] = (vec)MULTIPLY_ADD((float32x4_t)sums[r][v], value, four[r], i);
            }
        }
    }
#endif
    for (; j < to; j++) {
        const float *values = (const float *)(keys[j] + offset);
        if (later)
            for (int i = 0; i < vecs * LANES * 4; i += 64) __builtin_prefetch(later[j] + offset + i);
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            vec value = load(values + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                sums[r][v] = multiply_add(splat(weights[r][j]), value, sums[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) store(out[r] + v * LANES, sums[r][v]);
}

#define FROM(out, d) ((float(*)[MAX_HEAD])((out)[0] + (d)))

ALWAYS void gather_all(const int rows, float (*weights)[KEYS], const char *const *keys,
                       const char *const *later, int64_t offset, int from, int to, int64_t D,
                       float (*out)[MAX_HEAD]) {
    int64_t d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES)
        gather(rows, 4, weights, keys, later, offset + 4 * d, from, to, FROM(out, d));
    for (; d < D; d += LANES)
        gather(rows, 1, weights, keys, later, offset + 4 * d, from, to, FROM(out, d));
}

/* `gather_all` for up to 4 rows. */
static void gather_some(int rows, float (*weights)[KEYS], const char *const *keys,
                        const char *const *later, int64_t offset, int from, int to, int64_t D,
                        float (*out)[MAX_HEAD]) {
    switch (rows) {
    case 1: gather_all(1, weights, keys, later, offset, from, to, D, out); break;
    case 2: gather_all(2, weights, keys, later, offset, from, to, D, out); break;
    case 3: gather_all(3, weights, keys, later, offset, from, to, D, out); break;
    case 4: gather_all(4, weights, keys, later, offset, from, to, D, out); break;
    }
}

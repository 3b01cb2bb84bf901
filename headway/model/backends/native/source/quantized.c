/* Products with quantized weights.

   Inputs are quantized to 8 bits per group: x = s * i. Then w.x = scale * s * (q.i) + minimum * s *
   sum of i, where q.i is a dot product of bytes: an integer, exact in any order of addition. */

#define QUANT_ROWS 8   /* maximum number of rows computed in registers */
#define QUANT_PANELS 4 /* panels of outputs per task */
#define PANELS_IN_CACHE (LANES == 16 ? 2 : QUANT_PANELS) /* panels that are multiplied with all rows */
#define PREFETCH_BYTES 4096   /* bytes ahead of use at which weights are prefetched */
#define WHOLE(M) (((M) + INTERLEAVED - 1) / INTERLEAVED * INTERLEAVED)

/* Quantized rows: i, and for every group its scale s and s * sum of i. The groups of INTERLEAVED rows
   are interleaved, one group after the other. */
typedef struct {
    int8_t *q;
    float *steps, *totals;
    int64_t K;
} QuantizedRows;

/* The rows from row m on, up to the end of its interleaved rows. */
ALWAYS QuantizedRows from_row(QuantizedRows x, int64_t m) {
    const int64_t before = m / INTERLEAVED * INTERLEAVED, scales = before * (x.K / GROUP) + m % INTERLEAVED;
    x.q += before * x.K + quad_of((int)(m % INTERLEAVED), 0);
    x.steps += scales, x.totals += scales;
    return x;
}

/* The integers in the lowest bits of `biased`, one in each byte. */
ALWAYS void to_bytes(const vec biased[GROUP / LANES], int8_t to[GROUP]) {
#if defined(__AVX512F__)
    for (int i = 0; i < GROUP / LANES; i++)
        _mm_storeu_si128((__m128i *)(to + i * LANES), _mm512_cvtepi32_epi8((__m512i)biased[i]));
#else
    int32_t whole[GROUP];
    memcpy(whole, biased, sizeof whole);
    for (int i = 0; i < GROUP; i++) to[i] = (int8_t)whole[i];
#endif
}

/* Round one row, LANES groups at a time. */
static void round_row(const float *x, QuantizedRows to) {
    const int64_t groups = to.K / GROUP;
    for (int64_t first = 0; first < groups; first += LANES) {
        const int count = groups - first < LANES ? (int)(groups - first) : LANES;
        vec most[LANES], total[LANES];
        for (int n = 0; n < LANES; n++) most[n] = total[n] = (vec){0};
        for (int n = 0; n < count; n++)
#pragma GCC unroll 8
            for (int i = 0; i < GROUP; i += LANES) {
                const vec part = load(x + (first + n) * GROUP + i);
                most[n] = larger(larger(part, -part), most[n]);
            }
        const vec tops = fold(most, larger), steps = tops / 127.0f;
        const vec inverses = (vec)((ivec)(127.0f / tops) & (tops > 0));
        for (int n = 0; n < count; n++) {
            vec biased[GROUP / LANES];
            int8_t rounded[GROUP];
#pragma GCC unroll 8
            for (int i = 0; i < GROUP / LANES; i++) {
                biased[i] = load(x + (first + n) * GROUP + i * LANES) * inverses[n] + MAGIC;
                total[n] += biased[i] - MAGIC;
            }
            to_bytes(biased, rounded);
#pragma GCC unroll 8
            for (int i = 0; i < GROUP / 4; i++)
                memcpy(to.q + (first + n) * GROUP * INTERLEAVED + quad_of(0, i), rounded + 4 * i, 4);
        }
        const vec totals = steps * sums_of(total);
        for (int n = 0; n < count; n++) {
            to.steps[(first + n) * INTERLEAVED] = steps[n];
            to.totals[(first + n) * INTERLEAVED] = totals[n];
        }
    }
}

/* Add one group to some outputs of a row, in the order that all variants of the product use. */
ALWAYS vec add_group(vec sums, vec dots, vec scale, vec minimum, QuantizedRows x, int64_t at) {
    vec part = dots * x.steps[at];
    sums = multiply_add(part, scale, sums);
    sums = multiply_add(minimum, splat(x.totals[at]), sums);
    return sums;
}

/* The q of one of two quads that share their bytes. */
ALWAYS bytes half_of(bytes b, const int is_high, const int bits) {
    b = is_high ? high(b) : low(b);
    return bits == CODED ? decode(b) : b;
}

/* out[rows, panels] from some rows and neighbouring panels. Prefetches weights if `starts`: other rows
   find them in a cache. */
ALWAYS void quantized_tile(const int rows, const int panels, const int bits, const uint8_t *w,
                           QuantizedRows x, int starts, float out[QUANT_ROWS][QUANT_PANELS * LANES]) {
    const int group_bytes = GROUP_BYTES(bits);
    const int64_t groups = x.K / GROUP, panel = groups * group_bytes;
    const int is_kept = rows * panels <= 8; /* sums are in registers, or else in `out` */
    vec sums[QUANT_ROWS][QUANT_PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            if (is_kept) sums[r][p] = (vec){0};
            else store(out[r] + p * LANES, (vec){0});
        }
    for (int64_t g = 0; g < groups; g++) {
        ivec dots[QUANT_ROWS][QUANT_PANELS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) dots[r][p] = (ivec){0};
        const uint8_t *group = w + g * group_bytes;
        const int8_t *from = x.q + g * GROUP * INTERLEAVED;
        if (starts) {
            /* At the end of the panels follow those of the next tile, not the neighbouring ones. */
            const int is_end = (g + 1) * group_bytes + PREFETCH_BYTES > panel;
            const uint8_t *ahead = group + PREFETCH_BYTES + (is_end ? (panels - 1) * panel : 0);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
#pragma GCC unroll 16
                for (int i = 0; i < group_bytes; i += 64)
                    __builtin_prefetch(ahead + p * panel + i);
        }
#pragma GCC unroll 8
        for (int quad = 0; quad < GROUP / 4; quad++) {
            bytes b[QUANT_PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                b[p] = load_bytes(group + p * panel + quad * PACKED(bits) / 8 * LANES * 4);
                if (bits != 8) b[p] = half_of(b[p], quad % 2, bits);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++) dots[r][p] = dot(dots[r][p], b[p], from, r, quad);
        }
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const uint16_t *halves = (const uint16_t *)(group + p * panel + LANES * 4 * PACKED(bits));
            vec scale = load_halves(halves), minimum = load_halves(halves + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const vec whole = __builtin_convertvector(dots[r][p], vec);
                const vec before = is_kept ? sums[r][p] : load(out[r] + p * LANES);
                const vec sum = add_group(before, whole, scale, minimum, x, g * INTERLEAVED + r);
                if (is_kept) sums[r][p] = sum;
                else store(out[r] + p * LANES, sum);
            }
        }
    }
    if (is_kept)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) store(out[r] + p * LANES, sums[r][p]);
}

/* Some panels for some rows, in parts whose dot products fit in registers. */
ALWAYS void quantized_tiles(const int rows, const int panels, const int bits, const uint8_t *w,
                            QuantizedRows x, int starts,
                            float out[QUANT_ROWS][QUANT_PANELS * LANES]) {
    const int together = rows == 1 ? panels : rows <= 4 ? 2 : 1;
    if (LANES == 16 && rows > 4 && !starts) /* faster, but memory is read faster panel by panel */
        quantized_tile(rows, panels, bits, w, x, 0, out);
    else
        for (int p = 0; p < panels; p += together)
            quantized_tile(rows, together, bits, w + p * (x.K / GROUP) * GROUP_BYTES(bits), x, starts,
                           (float(*)[QUANT_PANELS * LANES])(out[0] + p * LANES));
}

/* QUANT_PANELS panels for a single row, PANELS_IN_CACHE for one of several blocks of rows. */
static void quantized_tiles_of(int rows, int is_single, int64_t bits, const uint8_t *w,
                               QuantizedRows x, int starts,
                               float out[QUANT_ROWS][QUANT_PANELS * LANES]) {
#define BITS(n, panels)                                                    \
    if (bits == 4) quantized_tiles(n, panels, 4, w, x, starts, out);       \
    else if (bits == CODED) quantized_tiles(n, panels, CODED, w, x, starts, out); \
    else quantized_tiles(n, panels, 8, w, x, starts, out);
#define CASE(n) case n: BITS(n, PANELS_IN_CACHE) break;
    if (is_single) {
        BITS(1, QUANT_PANELS)
        return;
    }
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
#undef BITS
}

/* Prefetch the outputs while they are computed, because they are often no longer in the cache. */
ALWAYS void fetch(float *y, int count) {
    for (int i = 0; i < count; i += 16) __builtin_prefetch(y + i, 1);
}

/* One task: all rows, and the outputs of QUANT_PANELS panels, of which some at a time are multiplied
   with all rows. */
static void panels_task(int64_t task, QuantizedRows x, int64_t M, const uint8_t *w, int64_t N,
                        int64_t bits, const float *bias, float *y, int64_t adds) {
    const int64_t panel = x.K / GROUP * GROUP_BYTES(bits), width = QUANT_PANELS * LANES;
    const int64_t part = (M == 1 ? QUANT_PANELS : PANELS_IN_CACHE) * LANES;
    for (int64_t n = task * width; n < N && n < (task + 1) * width; n += part)
        for (int64_t m = 0; m < M; m += QUANT_ROWS) {
            float out[QUANT_ROWS][QUANT_PANELS * LANES];
            const int count = N - n < part ? (int)(N - n) : (int)part;
            const int rows = M - m < QUANT_ROWS ? (int)(M - m) : QUANT_ROWS;
            for (int r = 0; r < rows; r++) fetch(y + (m + r) * N + n, count);
            quantized_tiles_of(rows, M == 1, bits, w + n / LANES * panel, from_row(x, m), m == 0, out);
            for (int r = 0; r < rows; r++)
                put(y + (m + r) * N + n, out[r], bias ? bias + n : 0, count, (int)adds);
        }
}

#if TILES
#include "tiles.c"
#else
#define USE_TILES(M, K) 0
#define tiles_task panels_task
#endif

/* Quantized rows in a buffer that is as large as x with M rounded up to INTERLEAVED. */
static QuantizedRows rows_in(float *space, int64_t M, int64_t K) {
    const int64_t scales = WHOLE(M) * (K / GROUP);
    return (QuantizedRows){(int8_t *)(space + 2 * scales), space, space + scales, K};
}

/* Like linear_task, with quantized weights; the number of panels is a multiple of QUANT_PANELS. */
static int64_t quantized_tasks(int64_t N) {
    return (N + QUANT_PANELS * LANES - 1) / (QUANT_PANELS * LANES);
}

static void quantized_task(int64_t task, QuantizedRows x, int64_t M, const uint8_t *w, int64_t N,
                           int64_t bits, const float *bias, float *y, int64_t adds) {
    if (USE_TILES(M, x.K)) tiles_task(task, x, M, w, N, bits, bias, y, adds);
    else panels_task(task, x, M, w, N, bits, bias, y, adds);
}

/* Row `id` of the weights, as floats. */
static void quantized_weight_row(int64_t id, int64_t K, const uint8_t *w, int64_t bits, float *y) {
    const int64_t groups = K / GROUP;
    const uint8_t *panel = w + id / LANES * groups * GROUP_BYTES(bits);
    const int lane = (int)(id % LANES);
    for (int64_t g = 0; g < groups; g++, panel += GROUP_BYTES(bits)) {
        const uint16_t *halves = (const uint16_t *)(panel + LANES * 4 * PACKED(bits));
        const float scale = load_halves(halves)[lane], minimum = load_halves(halves + LANES)[lane];
        for (int i = 0; i < GROUP; i++) {
            const int quad = bits == 8 ? i / 4 : i / 8;
            int q = panel[quad * LANES * 4 + lane * 4 + i % 4];
            if (bits != 8) q = i / 4 % 2 ? q >> 4 : q & 15;
            else if (SIGNED) q = (int8_t)q;
            if (bits == CODED) q = decoded[q];
            y[g * GROUP + i] = scale * (float)q + minimum;
        }
    }
}

/* Products with quantized weights.

   Inputs are quantized to 8 bits per group: x = s * i. Then w.x = scale * s * (q.i) + minimum * s *
   sum of i, where q.i is a dot product of bytes: an integer, exact in any order of addition. */

#define QUANT_ROWS 8   /* maximum number of rows computed in registers */
#define QUANT_PANELS 4 /* panels of outputs per task */
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

static void round_row(const float *x, QuantizedRows to) {
    for (int64_t g = 0; g < to.K / GROUP; g++, x += GROUP, to.q += GROUP * INTERLEAVED) {
        vec most = {0}, total = {0};
        for (int i = 0; i < GROUP; i += LANES)
            most = larger(larger(load(x + i), -load(x + i)), most);
        const float top = largest(most), inverse = top > 0 ? 127.0f / top : 0;
        float whole[GROUP];
        int8_t rounded[GROUP];
        for (int i = 0; i < GROUP; i++) whole[i] = rintf(x[i] * inverse);
        for (int i = 0; i < GROUP; i++) rounded[i] = (int8_t)(int32_t)whole[i];
        for (int i = 0; i < GROUP; i += LANES) total += load(whole + i);
        for (int i = 0; i < GROUP / 4; i++) memcpy(to.q + quad_of(0, i), rounded + 4 * i, 4);
        to.steps[g * INTERLEAVED] = top / 127.0f;
        to.totals[g * INTERLEAVED] = top / 127.0f * sum(total);
    }
}

/* Add one group to some outputs of a row, in the order that all variants of the product use. */
ALWAYS vec add_group(vec sums, vec dots, vec scale, vec minimum, QuantizedRows x, int64_t at) {
    vec part = dots * x.steps[at];
    sums += part * scale;
    sums += minimum * x.totals[at];
    return sums;
}

ALWAYS void quantized_tile(const int rows, const int panels, const int bits, const uint8_t *w,
                           QuantizedRows x, float out[QUANT_ROWS][QUANT_PANELS * LANES]) {
    const int64_t groups = x.K / GROUP, panel = groups * GROUP_BYTES(bits);
    vec sums[QUANT_ROWS][QUANT_PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) sums[r][p] = (vec){0};
    for (int64_t g = 0; g < groups; g++) {
        ivec dots[QUANT_ROWS][QUANT_PANELS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) dots[r][p] = (ivec){0};
        const uint8_t *group = w + g * GROUP_BYTES(bits);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 16
            for (int i = 0; i < GROUP_BYTES(bits); i += 64)
                __builtin_prefetch(group + p * panel + PREFETCH_BYTES + i);
#pragma GCC unroll 8
        for (int j = 0; j < bits; j++) {
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                bytes b = load_bytes(group + p * panel + j * LANES * 4);
                const int8_t *from = x.q + g * GROUP * INTERLEAVED;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    if (bits == 4) {
                        dots[r][p] = dot(dots[r][p], low(b), from, r, 2 * j);
                        dots[r][p] = dot(dots[r][p], high(b), from, r, 2 * j + 1);
                    } else
                        dots[r][p] = dot(dots[r][p], b, from, r, j);
                }
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const uint16_t *halves = (const uint16_t *)(group + p * panel + LANES * 4 * bits);
            vec scale = load_halves(halves), minimum = load_halves(halves + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vec whole = __builtin_convertvector(dots[r][p], vec);
                sums[r][p] = add_group(sums[r][p], whole, scale, minimum, x, g * INTERLEAVED + r);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) store(out[r] + p * LANES, sums[r][p]);
}

/* QUANT_PANELS panels for some rows, in parts that fit in registers. */
ALWAYS void quantized_tiles(const int rows, const int bits, const uint8_t *w, QuantizedRows x,
                            float out[QUANT_ROWS][QUANT_PANELS * LANES]) {
    const int together = rows == 1 ? 4 : rows <= 4 ? 2 : 1;
    for (int p = 0; p < QUANT_PANELS; p += together)
        quantized_tile(rows, together, bits, w + p * (x.K / GROUP) * GROUP_BYTES(bits), x,
                       (float(*)[QUANT_PANELS * LANES])(out[0] + p * LANES));
}

static void quantized_tiles_of(int rows, int64_t bits, const uint8_t *w, QuantizedRows x,
                               float out[QUANT_ROWS][QUANT_PANELS * LANES]) {
#define CASE(n)                                            \
    case n:                                                \
        if (bits == 4) quantized_tiles(n, 4, w, x, out);   \
        else quantized_tiles(n, 8, w, x, out);             \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
}

/* Prefetch the outputs while they are computed, because they are often no longer in the cache. */
ALWAYS void fetch(float *y, int count) {
    for (int i = 0; i < count; i += 16) __builtin_prefetch(y + i, 1);
}

/* One task: all rows, and the outputs of QUANT_PANELS panels. */
static void share_panels(Member *me, QuantizedRows x, int64_t M, const uint8_t *w, int64_t N, int64_t bits,
                         const float *bias, float *y, int64_t adds) {
    const int64_t panel = x.K / GROUP * GROUP_BYTES(bits), width = QUANT_PANELS * LANES;
    for (int64_t task; (task = next_task(me, (N + width - 1) / width)) >= 0;) {
        float out[QUANT_ROWS][QUANT_PANELS * LANES];
        const int64_t first = task * width;
        const int count = N - first < width ? (int)(N - first) : (int)width;
        for (int64_t m = 0; m < M; m += QUANT_ROWS) {
            const int rows = M - m < QUANT_ROWS ? (int)(M - m) : QUANT_ROWS;
            for (int r = 0; r < rows; r++) fetch(y + (m + r) * N + first, count);
            quantized_tiles_of(rows, bits, w + task * QUANT_PANELS * panel, from_row(x, m), out);
            for (int r = 0; r < rows; r++)
                put(y + (m + r) * N + first, out[r], bias ? bias + first : 0, count, (int)adds);
        }
    }
}

#if TILES
#include "tiles.c"
#else
#define USE_TILES(M, K) 0
#define share_tiles share_panels
#endif

/* Quantized rows in a buffer that is as large as x with M rounded up to INTERLEAVED. */
static QuantizedRows rows_in(float *space, int64_t M, int64_t K) {
    const int64_t scales = WHOLE(M) * (K / GROUP);
    return (QuantizedRows){(int8_t *)(space + 2 * scales), space, space + scales, K};
}

/* Like share_linear, with quantized weights; the number of panels is a multiple of QUANT_PANELS. */
static void share_quantized_linear(Member *me, QuantizedRows x, int64_t M, const uint8_t *w, int64_t N,
                                   int64_t bits, const float *bias, float *y, int64_t adds) {
    if (USE_TILES(M, x.K)) share_tiles(me, x, M, w, N, bits, bias, y, adds);
    else share_panels(me, x, M, w, N, bits, bias, y, adds);
}

/* Rows `ids` of the weights, as floats. */
static void quantized_rows(const int64_t *ids, int64_t M, int64_t K, const uint8_t *w, int64_t bits,
                    float *y) {
    const int64_t groups = K / GROUP;
    for (int64_t m = 0; m < M; m++) {
        const uint8_t *panel = w + ids[m] / LANES * groups * GROUP_BYTES(bits);
        const int lane = (int)(ids[m] % LANES);
        for (int64_t g = 0; g < groups; g++, panel += GROUP_BYTES(bits)) {
            const uint16_t *halves = (const uint16_t *)(panel + LANES * 4 * bits);
            const float scale = load_halves(halves)[lane], minimum = load_halves(halves + LANES)[lane];
            for (int i = 0; i < GROUP; i++) {
                const int quad = bits == 4 ? i / 8 : i / 4;
                int q = panel[quad * LANES * 4 + lane * 4 + i % 4];
                if (bits == 4) q = i / 4 % 2 ? q >> 4 : q & 15;
                else if (SIGNED) q = (int8_t)q;
                y[m * K + g * GROUP + i] = scale * (float)q + minimum;
            }
        }
    }
}

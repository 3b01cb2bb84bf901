/* Products with 8-bit weights on Arm CPUs with dot products of bytes.

   Weights are scale * q in groups of WIDE inputs, with q from -127 to 127. A panel contains WIDTH
   outputs; each of its groups has the q, four inputs of each output next to each other, and then the
   scales as float16. Inputs are quantized per row in the same groups: x = step * i.

   Rows are quantized in blocks of 8, 4 or 1, the sizes for which there is a tile: 4 outputs of 8
   rows, 8 of 4 or 16 of 1 fill the registers. A group of a block has four inputs (eight for CPUs with
   8-bit matrix instructions) of each of the first four rows next to each other, and then those of the
   other rows. Threads quantize four rows each, because rows that are interleaved share cache lines.
   Dot products are exact integers, and every tile adds groups in the same order, so the result of a
   row does not depend on its block. */

#define WIDE 64
#define WIDTH 16
#define WIDE_BYTES (WIDTH * WIDE + WIDTH * 2)
#define WIDE_ROWS_IN_CACHE 128
#define WIDE_AHEAD 4096 /* bytes ahead of use at which a tile of one row prefetches weights */
#define MAGIC 12582912.0f /* 1.5 * 2^23: the bits of MAGIC + i are those of MAGIC, plus i */
#define MAGIC_BITS 0x4b400000

/* A block of quantized rows. */
typedef struct {
    int8_t *q;
    float *steps; /* [groups, rows] */
    int rows;     /* 8, 4 or 1 */
    int64_t K;
} WideRows;

/* The block of row m among M rows, in a buffer that is as large as x with M rounded up to 8. */
ALWAYS WideRows wide_block(float *space, int64_t M, int64_t K, int64_t m) {
    const int64_t first = m / 8 * 8, groups = K / WIDE, left = M - first;
    const int rows = M == 1 ? 1 : left > 4 ? 8 : 4;
    int8_t *all = (int8_t *)(space + (M + 7) / 8 * 8 * groups);
    return (WideRows){all + first * K, space + first * groups, rows, K};
}

/* The place of four inputs of a row in a group of its block. */
ALWAYS int wide_place(int rows, int row, int quad) {
    if (rows == 1) return quad * 4;
    const int first = row / 4 * 4 * WIDE;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return first + quad / 2 * 32 + row % 4 * 8 + quad % 2 * 4;
#else
    return first + quad * 16 + row % 4 * 4;
#endif
}

/* Quantize a row into its place in a block. */
static void quantize_wide(const float *x, WideRows to, int row) {
    for (int64_t g = 0; g < to.K / WIDE; g++, x += WIDE) {
        float32x4_t most = vdupq_n_f32(0);
        for (int i = 0; i < WIDE; i += 4) most = vmaxq_f32(most, vabsq_f32(vld1q_f32(x + i)));
        const float top = vmaxvq_f32(most), inverse = top > 0 ? 127.0f / top : 0;
        int8_t *q = to.q + g * WIDE * to.rows;
        for (int i = 0; i < WIDE; i += 16) {
            int32x4_t whole[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                whole[j] = vreinterpretq_s32_f32(
                    vfmaq_n_f32(vdupq_n_f32(MAGIC), vld1q_f32(x + i + 4 * j), inverse));
            const int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(whole[0]), vreinterpretq_s16_s32(whole[1]));
            const int16x8_t high = vuzp1q_s16(vreinterpretq_s16_s32(whole[2]), vreinterpretq_s16_s32(whole[3]));
            int8_t bytes[16];
            vst1q_s8(bytes, vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high)));
            for (int j = 0; j < 4; j++)
                memcpy(q + wide_place(to.rows, row, i / 4 + j), bytes + 4 * j, 4);
        }
        to.steps[g * to.rows + row] = top / 127.0f;
    }
}

#define DOT(sums, w, x, lane)                                   \
    ((lane) == 0   ? vdotq_laneq_s32(sums, w, x, 0)             \
     : (lane) == 1 ? vdotq_laneq_s32(sums, w, x, 1)             \
     : (lane) == 2 ? vdotq_laneq_s32(sums, w, x, 2)             \
                   : vdotq_laneq_s32(sums, w, x, 3))

ALWAYS float32x4_t wide_scales(const int8_t *group, int output) {
    const uint16_t *halves = (const uint16_t *)(group + WIDTH * WIDE) + output;
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
}

/* The dot products of a group as floats, times the scales of the weights. Adding i to the bits of
   MAGIC and subtracting MAGIC is faster than a conversion, which occupies a unit for two cycles. */
ALWAYS float32x4_t scaled(int32x4_t dots, float32x4_t scale) {
    return vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(dots), vdupq_n_f32(MAGIC)), scale);
}

static const int32_t magic_bits[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};

/* Load a vector even if a register holds it: a copy would occupy a unit that computes dot products. */
ALWAYS float32x4_t reload(const void *from) {
    float32x4_t loaded;
    __asm__ volatile("ldr %q0, %1" : "=w"(loaded) : "m"(*(const float(*)[4])from));
    return loaded;
}

/* WIDTH outputs of one row. */
static void wide_row(const int8_t *w, WideRows x, float out[8][WIDTH]) {
    float32x4_t sums[4];
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) sums[p] = vdupq_n_f32(0);
    const int8_t *q = x.q;
    for (int64_t g = 0; g < x.K / WIDE; g++, w += WIDE_BYTES, q += WIDE) {
        int32x4_t dots[4];
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) dots[p] = vdupq_n_s32(MAGIC_BITS);
#pragma GCC unroll 16
        for (int quad = 0; quad < WIDE / 4; quad++) {
            const int8x16_t four = vld1q_s8(q + quad / 4 * 16);
            __builtin_prefetch(w + quad * 64 + WIDE_AHEAD);
#pragma GCC unroll 4
            for (int p = 0; p < 4; p++)
                dots[p] = DOT(dots[p], vld1q_s8(w + quad * 64 + p * 16), four, quad % 4);
        }
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++)
            sums[p] = vfmaq_n_f32(sums[p], scaled(dots[p], wide_scales(w, p * 4)), x.steps[g]);
    }
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) vst1q_f32(out[0] + p * 4, sums[p]);
}

/* The dot products of a group, plus MAGIC_BITS: those of row r and vector v in dots[v * rows + r]. */
ALWAYS void wide_dots(const int rows, const int vecs, const int8_t *w, int first, const int8_t *q,
                      int32x4_t dots[8]) {
    const int tiles = rows * vecs;
#if defined(__ARM_FEATURE_MATMUL_INT8) /* one instruction multiplies two rows and two outputs */
    int32x4_t pairs[8]; /* of rows 2 r and 2 r + 1: outputs 0 and 1, then outputs 2 and 3 */
#pragma GCC unroll 8
    for (int t = 0; t < tiles; t++) pairs[t] = vreinterpretq_s32_f32(reload(magic_bits));
#pragma GCC unroll 1
    for (int quad = 0; quad < WIDE / 4; quad += 2)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) {
            const int8_t *from = w + quad * 64 + first * 4 + v * 16;
            const int32x4_t low = vreinterpretq_s32_s8(vld1q_s8(from));
            const int32x4_t high = vreinterpretq_s32_s8(vld1q_s8(from + 64));
            const int8x16_t weights[2] = {vreinterpretq_s8_s32(vzip1q_s32(low, high)),
                                          vreinterpretq_s8_s32(vzip2q_s32(low, high))};
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int8x16_t two = vld1q_s8(q + wide_place(rows, r / 2 * 2, quad));
                pairs[v * rows + r] = vmmlaq_s32(pairs[v * rows + r], two, weights[r % 2]);
            }
        }
#pragma GCC unroll 8
    for (int t = 0; t < tiles; t += 2) {
        const int64x2_t left = vreinterpretq_s64_s32(pairs[t]);
        const int64x2_t right = vreinterpretq_s64_s32(pairs[t + 1]);
        dots[t] = vreinterpretq_s32_s64(vzip1q_s64(left, right));
        dots[t + 1] = vreinterpretq_s32_s64(vzip2q_s64(left, right));
    }
#else
#pragma GCC unroll 8
    for (int t = 0; t < tiles; t++) dots[t] = vreinterpretq_s32_f32(reload(magic_bits));
#pragma GCC unroll 1 /* with more, the compiler runs out of registers */
    for (int quad = 0; quad < WIDE / 4; quad++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) {
            const int8x16_t weights = vld1q_s8(w + quad * 64 + first * 4 + v * 16);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int8x16_t four = vld1q_s8(q + wide_place(rows, r / 4 * 4, quad));
                dots[v * rows + r] = DOT(dots[v * rows + r], weights, four, r % 4);
            }
        }
#endif
}

/* Four times `vecs` outputs, from output `first` of a panel on, of a block of `rows` rows. */
ALWAYS void wide_tile(const int rows, const int vecs, const int8_t *w, int first, WideRows x,
                      float out[8][WIDTH]) {
    float32x4_t sums[8];
    const int tiles = rows * vecs;
#pragma GCC unroll 8
    for (int t = 0; t < tiles; t++) sums[t] = vdupq_n_f32(0);
    const int8_t *q = x.q;
    for (int64_t g = 0; g < x.K / WIDE; g++, w += WIDE_BYTES, q += WIDE * rows) {
        int32x4_t dots[8];
        float32x4_t scales[2], offsets[2]; /* -MAGIC * scale has few bits, so that it is exact */
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) {
            scales[v] = wide_scales(w, first + v * 4);
            offsets[v] = vmulq_n_f32(scales[v], -MAGIC);
        }
        wide_dots(rows, vecs, w, first, q, dots);
#pragma GCC unroll 8
        for (int t = 0; t < tiles; t++) {
            const float32x4_t steps = vld1q_f32(x.steps + g * rows + t % rows / 4 * 4);
            const float32x4_t part = vfmaq_f32(reload(&offsets[t / rows]),
                                               vreinterpretq_f32_s32(dots[t]), scales[t / rows]);
            sums[t] = MULTIPLY_ADD(sums[t], part, steps, t % 4);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < tiles; t++) vst1q_f32(out[t % rows] + first + t / rows * 4, sums[t]);
}

static void wide_8_rows(const int8_t *w, WideRows x, float out[8][WIDTH]) {
    for (int first = 0; first < WIDTH; first += 4) wide_tile(8, 1, w, first, x, out);
}

static void wide_4_rows(const int8_t *w, WideRows x, float out[8][WIDTH]) {
    for (int first = 0; first < WIDTH; first += 8) wide_tile(4, 2, w, first, x, out);
}

/* A task of y[M, N] = x w + bias, or added to y, where `space` holds the quantized rows of x: one
   panel and the rows that fit in the cache. */
static int64_t wide_tasks(int64_t M, int64_t N) {
    return (N + WIDTH - 1) / WIDTH * ((M + WIDE_ROWS_IN_CACHE - 1) / WIDE_ROWS_IN_CACHE);
}

static void wide_task(int64_t task, float *space, int64_t M, int64_t K, const int8_t *w, int64_t N,
                      const float *bias, float *y, int64_t adds) {
    float out[8][WIDTH];
    const int64_t panels = (N + WIDTH - 1) / WIDTH, bytes = K / WIDE * WIDE_BYTES;
    const int64_t first = task % panels * WIDTH, from = task / panels * WIDE_ROWS_IN_CACHE;
    const int64_t to = from + WIDE_ROWS_IN_CACHE < M ? from + WIDE_ROWS_IN_CACHE : M;
    const int width = N - first < WIDTH ? (int)(N - first) : WIDTH;
    for (int64_t m = from; m < to; m += 8) {
        const WideRows block = wide_block(space, M, K, m);
        const int64_t rows = to - m < 8 ? to - m : 8;
        const int8_t *panel = w + task % panels * bytes;
        for (int64_t r = 0; r < rows; r++) __builtin_prefetch(y + (m + r) * N + first, 1);
        if (block.rows == 8) wide_8_rows(panel, block, out);
        else if (block.rows == 4) wide_4_rows(panel, block, out);
        else wide_row(panel, block, out);
        for (int64_t r = 0; r < rows; r++)
            put(y + (m + r) * N + first, out[r], bias ? bias + first : 0, width, (int)adds);
    }
}

/* Row `id` of the weights, as floats. */
static void wide_weight_row(int64_t id, int64_t K, const int8_t *w, float *y) {
    const int8_t *group = w + id / WIDTH * (K / WIDE) * WIDE_BYTES;
    const int output = (int)(id % WIDTH);
    for (int64_t k = 0; k < K; group += WIDE_BYTES) {
        float scales[4];
        vst1q_f32(scales, wide_scales(group, output / 4 * 4));
        for (int i = 0; i < WIDE; i++, k++)
            y[k] = scales[output % 4] * (float)group[i / 4 * 64 + output * 4 + i % 4];
    }
}

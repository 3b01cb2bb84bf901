/* Tiles of products with float weights on 64-bit Arm.

   Four inputs of a row are loaded as one vector, and an instruction multiplies by one of its lanes.
   A tile of up to 4 rows and 16 outputs, or 8 rows and 8 outputs, fits in the registers. */

#define INPUTS_IN_CACHE 512 /* of a panel of weights, in the first cache */

/* Outputs [first, first + 4 vecs) of a panel, added in the order of the inputs; to `out` if `adds`.
   Prefetches weights if `fetches`. */
ALWAYS void tile(const int rows, const int vecs, const int fetches, const float *x, int64_t stride,
                 const float *w, int64_t K, int first, int adds, float out[MAX_ROWS][PANEL]) {
    float32x4_t sums[MAX_ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            sums[r][v] = adds ? vld1q_f32(out[r] + first + v * 4) : vdupq_n_f32(0);
    int64_t k = 0;
    w += first;
    for (; k + 4 <= K; k += 4, w += 4 * PANEL) {
        float32x4_t inputs[MAX_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) inputs[r] = vld1q_f32(x + r * stride + k);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            if (fetches) __builtin_prefetch(w + (i + 4 * AHEAD) * PANEL);
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) {
                const float32x4_t weights = vld1q_f32(w + i * PANEL + v * 4);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    sums[r][v] = MULTIPLY_ADD(sums[r][v], weights, inputs[r], i);
            }
        }
    }
    for (; k < K; k++, w += PANEL)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++)
                sums[r][v] = vfmaq_n_f32(sums[r][v], vld1q_f32(w + v * 4), x[r * stride + k]);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) vst1q_f32(out[r] + first + v * 4, sums[r][v]);
}

/* A tile whose weights may be new to the first cache if it `starts` a panel. */
static void tile_of(int rows, int starts, const float *x, int64_t stride, const float *w, int64_t K,
                    int adds, float out[MAX_ROWS][PANEL]) {
#define CASE(n) case n: tile(n, 4, 1, x, stride, w, K, 0, adds, out); break;
#define TWICE(n, fetches)                                       \
    tile(n, 2, fetches, x, stride, w, K, 0, adds, out); \
    tile(n, 2, 0, x, stride, w, K, 8, adds, out);       \
    break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
        case 5: TWICE(5, 1)
        case 6: TWICE(6, 1)
        case 7: TWICE(7, 1)
        case 8:
            if (starts) tile(8, 2, 1, x, stride, w, K, 0, adds, out);
            else tile(8, 2, 0, x, stride, w, K, 0, adds, out);
            tile(8, 2, 0, x, stride, w, K, 8, adds, out);
    }
#undef CASE
#undef TWICE
}

/* out[rows, PANEL] = x w for one panel, in parts of which the first cache holds the weights. */
static void multiply_panel(int64_t rows, const float *x, int64_t K, const float *w,
                           float out[ROWS_IN_CACHE][PANEL]) {
    for (int64_t k = 0; k < K; k += INPUTS_IN_CACHE)
        for (int64_t m = 0; m < rows; m += MAX_ROWS)
            tile_of(rows - m < MAX_ROWS ? (int)(rows - m) : MAX_ROWS, m == 0, x + m * K + k, K,
                    w + k * PANEL, K - k < INPUTS_IN_CACHE ? K - k : INPUTS_IN_CACHE, k > 0, out + m);
}

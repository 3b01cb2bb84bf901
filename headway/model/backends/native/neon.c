/* Tiles of products with float weights on 64-bit Arm.

   Four inputs of a row are loaded as one vector, and an instruction multiplies by one of its lanes.
   A tile of up to 4 rows and 16 outputs, or 8 rows and 8 outputs, fits in the registers. */

/* Outputs [first, first + 4 vecs) of a panel, added in the order of the inputs. */
ALWAYS void tile(const int rows, const int vecs, const float *x, int64_t stride, const float *w,
                 int64_t K, int first, float out[MAX_ROWS][PANEL]) {
    float32x4_t sums[MAX_ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sums[r][v] = vdupq_n_f32(0);
    int64_t k = 0;
    w += first;
    for (; k + 4 <= K; k += 4, w += 4 * PANEL) {
        float32x4_t inputs[MAX_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) inputs[r] = vld1q_f32(x + r * stride + k);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            if (rows < 5) __builtin_prefetch(w + (i + 4 * AHEAD) * PANEL);
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

static void tile_of(int rows, const float *x, int64_t stride, const float *w, int64_t K,
                    float out[MAX_ROWS][PANEL]) {
    switch (rows) {
#define CASE(n) case n: tile(n, 4, x, stride, w, K, 0, out); break;
#define TWICE(n)                             \
    case n:                                  \
        tile(n, 2, x, stride, w, K, 0, out); \
        tile(n, 2, x, stride, w, K, 8, out); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) TWICE(5) TWICE(6) TWICE(7) TWICE(8)
#undef CASE
#undef TWICE
    }
}

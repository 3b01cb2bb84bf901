/* Products with float weights. */

#define ROWS_IN_CACHE 96
#define AHEAD 64 /* inputs ahead of use at which weights are prefetched */

#if defined(__aarch64__)
#include "neon.c"
#else

/* y[rows, PANEL] from x[rows, K] and one panel of weights [K, PANEL]. Prefetches the lines at `ahead`,
   which moves `step` floats with every input. */
ALWAYS void tile(const int rows, const float *x, int64_t stride, const float *w, int64_t K,
                 const float *ahead, int64_t step, float out[MAX_ROWS][PANEL]) {
    vec sums[MAX_ROWS][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[r][v] = (vec){0};
    for (int64_t k = 0; k < K; k++) {
        vec b[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) b[v] = load(w + k * PANEL + v * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < PANEL; i += 16) __builtin_prefetch(ahead + k * step + i);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++)
                sums[r][v] = multiply_add(splat(x[r * stride + k]), b[v], sums[r][v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) store(out[r] + v * LANES, sums[r][v]);
}

static void tile_of(int rows, const float *x, int64_t stride, const float *w, int64_t K,
                    const float *ahead, int64_t step, float out[MAX_ROWS][PANEL]) {
    switch (rows) {
#define CASE(n) case n: tile(n, x, stride, w, K, ahead, step, out); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MAX_ROWS > 6
        CASE(7) CASE(8)
#endif
#if MAX_ROWS > 8
        CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* out[rows, PANEL] = x w for one panel. If several tiles of rows need the panel, each prefetches a part
   of the next one; otherwise the tile prefetches the panel itself. */
static void multiply_panel(int64_t rows, const float *x, int64_t K, const float *w,
                           float out[ROWS_IN_CACHE][PANEL]) {
    const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, step = PANEL / tiles;
    const float *ahead = w + (tiles > 1 ? K : AHEAD) * PANEL;
    for (int64_t m = 0; m < rows; m += MAX_ROWS, ahead += K * step)
        tile_of(rows - m < MAX_ROWS ? (int)(rows - m) : MAX_ROWS, x + m * K, K, w, K, ahead, step,
                out + m);
}

#endif

/* Write a finished tile with its bias; add it to y if `adds`. */
ALWAYS void put(float *y, const float *from, const float *bias, int count, int adds) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec value = bias ? load(from + i) + load(bias + i) : load(from + i);
        store(y + i, adds ? load(y + i) + value : value);
    }
    for (; i < count; i++) {
        float value = bias ? from[i] + bias[i] : from[i];
        y[i] = adds ? y[i] + value : value;
    }
}

/* A task of y[M, N] = x[M, K] w + bias, or added to y, where w is in panels [ceil(N / PANEL), K,
   PANEL]: one panel and the rows that fit in the cache. */
static int64_t linear_tasks(int64_t M, int64_t N) {
    return (N + PANEL - 1) / PANEL * ((M + ROWS_IN_CACHE - 1) / ROWS_IN_CACHE);
}

static void linear_task(int64_t task, const float *x, int64_t M, int64_t K, const float *w, int64_t N,
                        const float *bias, float *y, int64_t adds) {
    float out[ROWS_IN_CACHE][PANEL];
    const int64_t panels = (N + PANEL - 1) / PANEL;
    const int64_t p = task % panels, first = p * PANEL, from = task / panels * ROWS_IN_CACHE;
    const int64_t rows = M - from < ROWS_IN_CACHE ? M - from : ROWS_IN_CACHE;
    const int width = N - first < PANEL ? (int)(N - first) : PANEL;
    multiply_panel(rows, x + from * K, K, w + p * K * PANEL, out);
    for (int64_t m = 0; m < rows; m++)
        put(y + (from + m) * N + first, out[m], bias ? bias + first : 0, width, (int)adds);
}

/* Row `id` of the weights. */
static void panel_row(int64_t id, int64_t K, const float *w, float *y) {
    w += id / PANEL * K * PANEL + id % PANEL;
    for (int64_t k = 0; k < K; k++) y[k] = w[k * PANEL];
}

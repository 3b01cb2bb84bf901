/* Products of the rows of a pass with a matrix in any form. */

typedef struct {
    const void *panels;
    const float *bias;
    int64_t outputs, inputs, bits, group; /* 32 bits: floats; group: inputs that share a scale */
} Weight;

#if defined(__ARM_FEATURE_DOTPROD)
#define IS_WIDE(w) ((w)->group == WIDE)
#else
#define IS_WIDE(w) 0
#endif

/* The parts of a pass that can be timed. */
enum { BEGINNING = -1, PREPARATION, QKV, ROTATION, ATTENTION, OUTPUT, ROUTER, GATE_UP, DOWN, HEAD, CHOICE };

/* Buffers that the rows of a pass share, or that each thread has for itself. */
typedef struct {
    int64_t threads;
    float *scratch;            /* (rows + 15) x the largest number of inputs of a product */
    float *own;                /* threads x own_size */
    int64_t own_size;          /* 8 x the largest number of inputs */
    int64_t *times;            /* nanoseconds of each part; 0: do not measure */
} Space;

/* Add the time since the last mark to a part. */
ALWAYS void mark(Member *me, const Space *space, int part) {
    if (!space->times || me->thread) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t at = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (part >= 0) space->times[part] += at - me->last;
    me->last = at;
}

/* The rows of the input of a product: x, x normalized (if there are weights), or x gated. */
typedef struct {
    const float *x, *norm;
    double epsilon;
    int activation;
    const int64_t *rows; /* which rows of x, to normalize them; 0: all */
} Input;

/* Row m of an input with K columns, computed in `to` if it is not just x. */
ALWAYS const float *input_row(const Input *in, int64_t m, int64_t K, float *to) {
    if (in->norm)
        normalize(in->x + (in->rows ? in->rows[m] : m) * K, in->norm, K, (float)in->epsilon, to);
    else if (in->activation) gate(in->x + m * 2 * K, K, in->activation, to);
    else return in->x + m * K;
    return to;
}

/* Prepare row m of an input in the form that the product with w reads, in `space` for M rows. */
static void prepare(const Input *in, int64_t m, int64_t M, const Weight *w, float *row, float *space) {
    const int64_t K = w->inputs, from = m < M ? m : M - 1;
    if (w->bits == 32) input_row(in, m, K, space + m * K);
#if defined(WIDE)
    else if (w->group == WIDE)
        quantize_wide(input_row(in, m, K, row), wide_block(space, M, K, m), (int)(m % 8));
#endif
    else round_row(input_row(in, from, K, row), from_row(rows_in(space, M, K), m));
}

/* Rows that are prepared for a product of M rows: tiles read whole groups of interleaved rows. */
static int64_t prepared_rows(const Weight *w, int64_t M) {
    return w->bits < 32 && USE_TILES(M, w->inputs) ? WHOLE(M) : M;
}

/* The number of tasks of a product of M rows with w. */
static int64_t product_tasks(const Weight *w, int64_t M) {
    if (w->bits == 32) return linear_tasks(M, w->outputs);
#if defined(WIDE)
    if (w->group == WIDE) return wide_tasks(M, w->outputs);
#endif
    return quantized_tasks(w->outputs);
}

/* One task of y[M, outputs] = x w, or added to y; x holds M rows in the form that w reads. */
static void product_task(int64_t task, const float *x, int64_t M, const Weight *w, float *y,
                         int64_t adds) {
    const int64_t K = w->inputs, N = w->outputs;
    float *space = (float *)x; /* only read */
    if (w->bits == 32) linear_task(task, x, M, K, w->panels, N, w->bias, y, adds);
#if defined(WIDE)
    else if (w->group == WIDE) wide_task(task, space, M, K, w->panels, N, w->bias, y, adds);
#endif
    else quantized_task(task, rows_in(space, M, K), M, w->panels, N, w->bits, w->bias, y, adds);
}

/* y[M, outputs] = in w, or added to y. All threads of a team call a share_... function together. If
   there is one row, every thread prepares it for itself, which takes less time than a meeting. */
static void share_multiply(Member *me, const Input *in, int64_t M, const Weight *w, float *y,
                           int64_t adds, const Space *space) {
    float *row = space->own + me->thread * space->own_size;
    float *prepared = M == 1 ? row + space->own_size / 4 : space->scratch;
    const int is_ready = w->bits == 32 && !in->norm && !in->activation;
    if (M == 1) {
        if (!is_ready) prepare(in, 0, 1, w, row, prepared);
    } else if (!is_ready) {
        const int64_t padded = prepared_rows(w, M);
        const int64_t each = IS_WIDE(w) ? 4 : 1;
        for (int64_t task; (task = next_task(me, (padded + each - 1) / each)) >= 0;)
            for (int64_t m = task * each; m < padded && m < (task + 1) * each; m++)
                prepare(in, m, M, w, row, prepared);
        meet(me);
    }
    mark(me, space, PREPARATION);
    for (int64_t task; (task = next_task(me, product_tasks(w, M))) >= 0;)
        product_task(task, is_ready ? in->x : prepared, M, w, y, adds);
    meet(me);
}

/* Row `id` of weights, as floats. */
static void weight_row(const Weight *w, int64_t id, float *y) {
    if (w->bits == 32) panel_row(id, w->inputs, w->panels, y);
#if defined(WIDE)
    else if (w->group == WIDE) wide_weight_row(id, w->inputs, w->panels, y);
#endif
    else quantized_weight_row(id, w->inputs, w->panels, w->bits, y);
}

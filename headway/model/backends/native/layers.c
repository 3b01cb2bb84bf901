/* Layers, and the functions that Python calls. */

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

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    Weight qkv, output, gate_up, down;
    double epsilon;
} Layer;

/* The parts of a pass that can be timed. */
enum { BEGINNING = -1, PREPARATION, QKV, ROTATION, ATTENTION, OUTPUT, GATE_UP, DOWN };

/* Buffers that the rows of a pass share, or that each thread has for itself. */
typedef struct {
    int64_t threads;
    float *scratch;            /* (rows + 15) x the largest number of inputs of a product */
    float *own;                /* threads x own_size */
    int64_t own_size;          /* 8 x the largest number of inputs */
    int64_t *times;            /* nanoseconds of each part; 0: do not measure */
} Space;

/* What all layers of a forward pass share, and buffers for the results between products. */
typedef struct {
    Cache cache;
    Space space;
    int64_t rows, heads;
    const float *cosine, *sine;
    const int64_t *slots;
    const int32_t *tables, *starts, *ends, *tasks;
    int64_t table_width, num_tasks, tokens, split;
    double scale;
    float *qkv, *attended, *inner;
} Pass;

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
    int is_gated;
} Input;

/* Row m of an input with K columns, computed in `to` if it is not just x. */
ALWAYS const float *input_row(const Input *in, int64_t m, int64_t K, float *to) {
    if (in->norm) normalize(in->x + m * K, in->norm, K, (float)in->epsilon, to);
    else if (in->is_gated) gate(in->x + m * 2 * K, K, to);
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

/* y[M, outputs] = in w, or added to y. If there is one row, every thread prepares it for itself,
   which takes less time than a meeting. */
static void share_multiply(Member *me, const Input *in, int64_t M, const Weight *w, float *y,
                           int64_t adds, const Space *space) {
    float *row = space->own + me->thread * space->own_size;
    float *prepared = M == 1 ? row + space->own_size / 4 : space->scratch;
    const int is_ready = w->bits == 32 && !in->norm && !in->is_gated;
    if (M == 1) {
        if (!is_ready) prepare(in, 0, 1, w, row, prepared);
    } else if (!is_ready) {
        const int64_t padded = w->bits < 32 && USE_TILES(M, w->inputs) ? WHOLE(M) : M;
        const int64_t each = IS_WIDE(w) ? 4 : 1;
        for (int64_t task; (task = next_task(me, (padded + each - 1) / each)) >= 0;)
            for (int64_t m = task * each; m < padded && m < (task + 1) * each; m++)
                prepare(in, m, M, w, row, prepared);
        meet(me);
    }
    mark(me, space, PREPARATION);
    if (w->bits == 32)
        share_linear(me, is_ready ? in->x : prepared, M, w->inputs, w->panels, w->outputs, w->bias, y,
                     adds);
#if defined(WIDE)
    else if (w->group == WIDE)
        share_wide_linear(me, prepared, M, w->inputs, w->panels, w->outputs, w->bias, y, adds);
#endif
    else
        share_quantized_linear(me, rows_in(prepared, M, w->inputs), M, w->panels, w->outputs, w->bits,
                               w->bias, y, adds);
    meet(me);
}

static void share_layer(Member *me, const Layer *l, const Pass *p, const Cache *cache, float *x) {
    const Input normed = {.x = x, .norm = l->input_norm, .epsilon = l->epsilon};
    const Input attended = {.x = p->attended};
    const Input after = {.x = x, .norm = l->post_norm, .epsilon = l->epsilon};
    const Input gated = {.x = p->inner, .is_gated = 1};
    mark(me, &p->space, BEGINNING);
    share_multiply(me, &normed, p->rows, &l->qkv, p->qkv, 0, &p->space);
    mark(me, &p->space, QKV);
    share_rotate_and_store(me, p->qkv, p->rows, p->heads, p->cosine, p->sine, l->q_norm, l->k_norm,
                           l->epsilon, p->slots, cache);
    meet(me);
    mark(me, &p->space, ROTATION);
    share_attention(me, p->qkv, p->heads, cache, p->tables, p->table_width, p->starts, p->ends,
                    p->scale, p->tasks, p->num_tasks, p->tokens, p->split, p->attended);
    meet(me);
    mark(me, &p->space, ATTENTION);
    share_multiply(me, &attended, p->rows, &l->output, x, 1, &p->space);
    mark(me, &p->space, OUTPUT);
    share_multiply(me, &after, p->rows, &l->gate_up, p->inner, 0, &p->space);
    mark(me, &p->space, GATE_UP);
    share_multiply(me, &gated, p->rows, &l->down, x, 1, &p->space);
    mark(me, &p->space, DOWN);
}

/* The cache of one layer; in a Pass, layer_offset is the distance between layers. */
static Cache cache_of(const Pass *pass, int64_t layer) {
    Cache cache = pass->cache;
    cache.layer_offset *= layer;
    return cache;
}

/* The arguments of an exported function, for the threads of its team. */
typedef struct {
    const Pass *pass;
    const Layer *const *layers;
    int64_t first, count;
    float *x;
} LayersCall;

static void run_layers(Member *me, const void *call) {
    const LayersCall *c = call;
    for (int64_t i = 0; i < c->count; i++) {
        const Cache cache = cache_of(c->pass, c->first + i);
        share_layer(me, c->layers[i], c->pass, &cache, c->x);
    }
}

/* Run layers [first, first + count) on x[M, hidden] in place, with one team of threads. */
void layers(const Layer *const *layers, int64_t first, int64_t count, const Pass *pass, float *x) {
    const LayersCall call = {pass, layers, first, count, x};
    run_team(pass->space.threads, run_layers, &call);
}

typedef struct {
    Input in;
    int64_t M;
    const Weight *w;
    float *y;
    int64_t adds;
    const Space *space;
} MultiplyCall;

static void run_multiply(Member *me, const void *call) {
    const MultiplyCall *c = call;
    share_multiply(me, &c->in, c->M, c->w, c->y, c->adds, c->space);
}

/* y[M, outputs] = x w, or added to y; x is normalized first if there are norm weights. */
void multiply(const Weight *w, const float *x, int64_t M, const float *norm, double epsilon, float *y,
              int64_t adds, const Space *space) {
    const MultiplyCall call = {{x, norm, epsilon, 0}, M, w, y, adds, space};
    run_team(space->threads, run_multiply, &call);
}

/* The steps of a layer one by one, for models that are divided among processes. */

typedef struct {
    Input in;
    int64_t M, K;
    float *y;
} RowsCall;

static void run_rows(Member *me, const void *call) {
    const RowsCall *c = call;
    for (int64_t m; (m = next_task(me, c->M)) >= 0;) input_row(&c->in, m, c->K, c->y + m * c->K);
}

/* y[M, K] = x / (root mean square of its row) * weight. */
void rms_norm(const float *x, const float *weight, int64_t M, int64_t K, double epsilon, float *y,
              int64_t threads) {
    const RowsCall call = {{x, weight, epsilon, 0}, M, K, y};
    run_team(M > 4 ? threads : 1, run_rows, &call);
}

/* y[M, K] = silu(x[M, :K]) * x[M, K:]. */
void silu_multiply(const float *x, int64_t M, int64_t K, float *y, int64_t threads) {
    const RowsCall call = {{x, 0, 0, 1}, M, K, y};
    run_team(M > 4 ? threads : 1, run_rows, &call);
}

typedef struct {
    const Pass *pass;
    Cache cache;
    const float *q_norm, *k_norm;
    double epsilon;
    float *qkv, *out;
} StepCall;

static void run_rotate_and_store(Member *me, const void *call) {
    const StepCall *c = call;
    const Pass *p = c->pass;
    share_rotate_and_store(me, c->qkv, p->rows, p->heads, p->cosine, p->sine, c->q_norm, c->k_norm,
                           c->epsilon, p->slots, &c->cache);
}

void rotate_and_store(const Pass *pass, int64_t layer, float *qkv, const float *q_norm,
                      const float *k_norm, double epsilon) {
    const StepCall call = {pass, cache_of(pass, layer), q_norm, k_norm, epsilon, qkv, 0};
    run_team(pass->rows > 4 ? pass->space.threads : 1, run_rotate_and_store, &call);
}

static void run_attention(Member *me, const void *call) {
    const StepCall *c = call;
    const Pass *p = c->pass;
    share_attention(me, c->qkv, p->heads, &c->cache, p->tables, p->table_width, p->starts, p->ends,
                    p->scale, p->tasks, p->num_tasks, p->tokens, p->split, c->out);
}

void attention(const Pass *pass, int64_t layer, float *qkv, float *out) {
    const StepCall call = {pass, cache_of(pass, layer), 0, 0, 0, qkv, out};
    run_team(pass->space.threads, run_attention, &call);
}

/* Rows `ids` of weights, as floats: the embeddings of tokens. */
void weight_rows(const Weight *w, const int64_t *ids, int64_t M, float *y) {
#if defined(WIDE)
    if (w->group == WIDE) return wide_rows(ids, M, w->inputs, w->panels, y);
#endif
    quantized_rows(ids, M, w->inputs, w->panels, w->bits, y);
}

/* The layout for Python, which packs the weights: lanes, panel, whether 8-bit weights are signed,
   the size of a wide group (0: not supported) and the outputs in its panels, and the instructions of
   byte products (BYTE_PRODUCTS in bytes.c). */
void layout(int64_t *out) {
    out[0] = LANES, out[1] = PANEL, out[2] = SIGNED, out[3] = out[4] = 0, out[5] = BYTE_PRODUCTS;
#if defined(WIDE)
    out[3] = WIDE, out[4] = WIDTH;
#endif
}

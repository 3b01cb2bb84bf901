/* Layers, and the functions that Python calls. */

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    const float *attention_norm, *mlp_norm; /* of the outputs of attention and MLP; 0: none */
    const float *sinks; /* one more logit of each query head; 0: none */
    Weight qkv, output, gate_up, down;
    double epsilon;
    int64_t activation, is_windowed, is_rotated;
    const Experts *experts; /* 0: the layer has none, but gate_up and down */
} Layer;

typedef struct {
    Weight embedding, head;
    const float *norm; /* before the head */
    double epsilon, embedding_scale;
    const Layer *const *layers;
    int64_t num_layers;
} Model;

/* What all layers of a kind share in a forward pass, and buffers for the results between products.
   Sliding-window layers have a cache, a rope, slots and tables of their own. */
typedef struct {
    Cache cache;
    Space space;
    int64_t rows, heads, sequences, table_width, num_sampled;
    const float *cosine, *sine; /* of every position */
    const float *query_scale;   /* factors of queries at every position; 0: none */
    const int64_t *tokens, *positions, *slots;
    const int32_t *tables, *starts, *ends;
    const int64_t *sampled; /* rows whose logits are computed */
    int32_t *tasks;         /* of attention: sequence and first row; at most one for each row */
    int64_t num_tasks, task_rows, split;
    int64_t window; /* tokens that a token sees, itself included; 0: all before it */
    int64_t has_whole_norms; /* q and k are normalized over all heads, not each head */
    double scale;
    float *qkv, *attended, *inner;
    float *unnormed; /* outputs that are normalized before they are added; 0: the model has none */
    Routing *routing; /* 0: the model has no experts */
} Pass;

/* x += in w, where the product is normalized first if there are norm weights. */
static void share_add(Member *me, const Input *in, const Weight *w, const float *norm, double epsilon,
                      const Pass *p, float *x) {
    share_multiply(me, in, p->rows, w, norm ? p->unnormed : x, !norm, &p->space);
    if (!norm) return;
    const int64_t N = w->outputs;
    for (int64_t m; (m = next_task(me, p->rows)) >= 0;) {
        float *row = p->unnormed + m * N;
        normalize(row, norm, N, (float)epsilon, row);
        put(x + m * N, row, 0, (int)N, 1);
    }
    meet(me);
}

/* Normalize and rotate the q and k of rows qkv, and store k and v. */
static void share_heads(Member *me, const Pass *p, float *qkv, const float *q_norm,
                        const float *k_norm, double epsilon, int is_rotated, const Cache *cache) {
    const Turn turn = {is_rotated ? p->cosine : 0, p->sine, p->query_scale, p->positions};
    const HeadNorms norms = {q_norm, k_norm, (float)epsilon, (int)p->has_whole_norms};
    share_rotate_and_store(me, qkv, p->rows, p->heads, &turn, &norms, p->slots, cache);
}

static void share_layer(Member *me, const Layer *l, const Pass *p, const Cache *cache, float *x) {
    const Input normed = {.x = x, .norm = l->input_norm, .epsilon = l->epsilon};
    const Input attended = {.x = p->attended};
    const Input after = {.x = x, .norm = l->post_norm, .epsilon = l->epsilon};
    const Input gated = {.x = p->inner, .activation = (int)l->activation};
    mark(me, &p->space, BEGINNING);
    share_multiply(me, &normed, p->rows, &l->qkv, p->qkv, 0, &p->space);
    mark(me, &p->space, QKV);
    share_heads(me, p, p->qkv, l->q_norm, l->k_norm, l->epsilon, (int)l->is_rotated, cache);
    meet(me);
    mark(me, &p->space, ROTATION);
    share_attention(me, p->qkv, l->sinks, p->heads, cache, p->tables, p->table_width, p->starts, p->ends,
                    p->window, p->scale, p->tasks, p->num_tasks, p->task_rows, p->split, p->attended);
    meet(me);
    mark(me, &p->space, ATTENTION);
    share_add(me, &attended, &l->output, l->attention_norm, l->epsilon, p, x);
    mark(me, &p->space, OUTPUT);
    if (l->experts) {
        share_experts(me, l->experts, &after, p->rows, (int)l->activation, p->inner, p->routing,
                      &p->space, x);
        return;
    }
    share_multiply(me, &after, p->rows, &l->gate_up, p->inner, 0, &p->space);
    mark(me, &p->space, GATE_UP);
    share_add(me, &gated, &l->down, l->mlp_norm, l->epsilon, p, x);
    mark(me, &p->space, DOWN);
}

/* The cache of one layer; in a Pass, layer_offset is the distance between layers. */
static Cache cache_of(const Pass *pass, int64_t layer) {
    Cache cache = pass->cache;
    cache.layer_offset *= layer;
    return cache;
}

/* Divide the attention of a pass into tasks of at most task_rows rows of a sequence. If these are few,
   split the query heads too. */
static void divide(Pass *pass) {
    const int64_t group = pass->heads / pass->cache.heads;
    pass->num_tasks = 0;
    for (int64_t s = 0; s < pass->sequences; s++)
        for (int64_t m = pass->starts[s]; m < pass->starts[s + 1]; m += pass->task_rows) {
            int32_t *task = pass->tasks + 2 * pass->num_tasks++;
            task[0] = (int32_t)s, task[1] = (int32_t)m;
        }
    pass->split = pass->num_tasks * pass->cache.heads < 4 * pass->space.threads ? group : 1;
}

/* The embedding of a token, in row m of x. */
static void embed(const Model *model, int64_t token, float *x, int64_t m) {
    const int64_t K = model->embedding.inputs;
    const float scale = (float)model->embedding_scale;
    weight_row(&model->embedding, token, x + m * K);
    if (scale != 1)
        for (int64_t k = 0; k < K; k++) x[m * K + k] *= scale;
}

/* The logits of the sampled rows of x, and the first token with the highest logit of each. */
static void share_head(Member *me, const Model *model, const Pass *p, const float *x, float *logits,
                       int32_t *best) {
    const Input normed = {.x = x, .norm = model->norm, .epsilon = model->epsilon, .rows = p->sampled};
    const int64_t N = model->head.outputs;
    share_multiply(me, &normed, p->num_sampled, &model->head, logits, 0, &p->space);
    mark(me, &p->space, HEAD);
    for (int64_t m; (m = next_task(me, p->num_sampled)) >= 0;)
        best[m] = (int32_t)first_largest(logits + m * N, N);
    mark(me, &p->space, CHOICE);
}

/* The arguments of an exported function, for the threads of its team. */
typedef struct {
    const Model *model;
    const Pass *passes[2]; /* of the layers that see all tokens, and of those with a window */
    float *x, *logits;
    int32_t *best;
} ForwardCall;

static void run_forward(Member *me, const void *call) {
    const ForwardCall *c = call;
    const Pass *p = c->passes[0];
    int64_t places[2] = {0, 0};
    mark(me, &p->space, BEGINNING);
    for (int64_t m; (m = next_task(me, p->rows)) >= 0;) embed(c->model, p->tokens[m], c->x, m);
    meet(me);
    mark(me, &p->space, PREPARATION);
    for (int64_t i = 0; i < c->model->num_layers; i++) {
        const Layer *layer = c->model->layers[i];
        const Pass *own = c->passes[layer->is_windowed];
        const Cache cache = cache_of(own, places[layer->is_windowed]++);
        share_layer(me, layer, own, &cache, c->x);
    }
    if (p->num_sampled) share_head(me, c->model, p, c->x, c->logits, c->best);
}

/* Take a batch through the whole model with one team of threads: the hidden states x[M, hidden] after
   the last layer, and of the sampled rows the logits and the most probable tokens. `windowed` is the
   pass of the sliding-window layers; 0: the model has none. */
void forward(const Model *model, Pass *pass, Pass *windowed, float *x, float *logits, int32_t *best) {
    divide(pass);
    if (windowed) divide(windowed);
    const ForwardCall call = {model, {pass, windowed}, x, logits, best};
    run_team(pass->space.threads, run_forward, &call);
}

typedef struct {
    const Layer *layer;
    const Pass *pass;
    Cache cache;
    float *x;
} LayerCall;

static void run_layer(Member *me, const void *call) {
    const LayerCall *c = call;
    share_layer(me, c->layer, c->pass, &c->cache, c->x);
}

/* Run one layer on x[M, hidden] in place; `number` is its place in the KV blocks. */
void layer(const Layer *layer, int64_t number, Pass *pass, float *x) {
    divide(pass);
    const LayerCall call = {layer, pass, cache_of(pass, number), x};
    run_team(pass->space.threads, run_layer, &call);
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
    const MultiplyCall call = {{x, norm, epsilon, 0, 0}, M, w, y, adds, space};
    run_team(space->threads, run_multiply, &call);
}

/* Rows `ids` of weights, as floats: the embeddings of tokens. */
void weight_rows(const Weight *w, const int64_t *ids, int64_t M, float *y) {
    for (int64_t m = 0; m < M; m++) weight_row(w, ids[m], y + m * w->inputs);
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

/* The steps of a layer one by one, for models that are divided among processes. */

/* The experts of M rows and their factors, from the outputs of the router. */
void route(const Experts *e, float *logits, int64_t M, int64_t *chosen, float *factors) {
    const Routing routing = {.logits = logits, .chosen = chosen, .factors = factors};
    route_rows(e, &routing, 0, M);
}

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
    const RowsCall call = {{x, weight, epsilon, 0, 0}, M, K, y};
    run_team(M > 4 ? threads : 1, run_rows, &call);
}

/* y[M, K] = activation(x[M, :K]) * x[M, K:]. */
void gate_rows(const float *x, int64_t M, int64_t K, int64_t activation, float *y, int64_t threads) {
    const RowsCall call = {{x, 0, 0, (int)activation, 0}, M, K, y};
    run_team(M > 4 ? threads : 1, run_rows, &call);
}

typedef struct {
    const Pass *pass;
    Cache cache;
    const float *q_norm, *k_norm, *sinks;
    double epsilon;
    float *qkv, *out;
    int is_rotated;
} StepCall;

static void run_rotate_and_store(Member *me, const void *call) {
    const StepCall *c = call;
    const Pass *p = c->pass;
    share_heads(me, p, c->qkv, c->q_norm, c->k_norm, c->epsilon, c->is_rotated, &c->cache);
}

void rotate_and_store(const Pass *pass, int64_t layer, float *qkv, const float *q_norm,
                      const float *k_norm, double epsilon, int64_t is_rotated) {
    const StepCall call = {pass, cache_of(pass, layer), q_norm, k_norm, 0, epsilon, qkv, 0, (int)is_rotated};
    run_team(pass->rows > 4 ? pass->space.threads : 1, run_rotate_and_store, &call);
}

static void run_attention(Member *me, const void *call) {
    const StepCall *c = call;
    const Pass *p = c->pass;
    share_attention(me, c->qkv, c->sinks, p->heads, &c->cache, p->tables, p->table_width, p->starts, p->ends,
                    p->window, p->scale, p->tasks, p->num_tasks, p->task_rows, p->split, c->out);
}

void attention(Pass *pass, int64_t layer, float *qkv, const float *sinks, float *out) {
    divide(pass);
    const StepCall call = {pass, cache_of(pass, layer), 0, 0, sinks, 0, qkv, out, 0};
    run_team(pass->space.threads, run_attention, &call);
}

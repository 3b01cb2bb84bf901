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
    const float *q_norm, *k_norm;
    double epsilon;
    float *qkv, *out;
} StepCall;

static void run_rotate_and_store(Member *me, const void *call) {
    const StepCall *c = call;
    const Pass *p = c->pass;
    share_rotate_and_store(me, c->qkv, p->rows, p->heads, p->cosine, p->sine, p->positions,
                           c->q_norm, c->k_norm, c->epsilon, p->slots, &c->cache);
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
                    p->window, p->scale, p->tasks, p->num_tasks, p->task_rows, p->split, c->out);
}

void attention(Pass *pass, int64_t layer, float *qkv, float *out) {
    divide(pass);
    const StepCall call = {pass, cache_of(pass, layer), 0, 0, 0, qkv, out};
    run_team(pass->space.threads, run_attention, &call);
}

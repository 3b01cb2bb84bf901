/* Layers with experts: the router chooses some experts for each row, and only their weights are read.

   A pair is a row and one of its experts. Pairs are sorted by expert, so that each expert multiplies
   all its rows at once. A row's results are added in the order in which the router chose the experts,
   so that they do not depend on other rows. */

#define MAX_EXPERTS 1024
#define PREPARED_TOGETHER 8 /* rows that a task prepares */
#define SUMMED_TOGETHER 512 /* columns that a task adds */
#define MAX_ROUTED_TOGETHER 8 /* rows for which routing is not divided among threads */

/* The experts of a layer. The matrices of one that all rows use, if there is one, are the last ones. */
typedef struct {
    int64_t num_experts, num_chosen, normalizes, has_shared;
    Weight router; /* may have one more output: the gate of the expert that all rows use */
    const Weight *gate_up, *down;
} Experts;

/* An expert's product with its rows. */
typedef struct {
    Input in;
    const Weight *w;
    int64_t count;
    float *space, *y;
    int64_t begin[2]; /* its first task of preparing and of multiplying */
} Product;
_Static_assert(sizeof(Product) <= 128, "routing.py reserves 128 bytes");

typedef struct {
    Product *all;
    int64_t count, num_tasks[2];
} Products;

/* The experts of M rows, k + 1 numbers for each: the last is for the expert that all rows use. */
typedef struct {
    float *logits;          /* M x outputs of the router */
    float *factors;         /* M x (k + 1) */
    int64_t *chosen;        /* M x k */
    int64_t *pairs;         /* M x (k + 1): a row of `outputs` */
    int64_t *rows;          /* of each pair */
    float *outputs, *space; /* of the experts, and for their inputs */
    Products gate_up, down;
} Routing;

/* The experts of a row with the largest logits, largest first, and the factors of their outputs. */
static void route_row(const Experts *e, const float *logits, int64_t *chosen, float *factors) {
    const int64_t E = e->num_experts, k = e->num_chosen;
    float weights[MAX_EXPERTS + LANES];
    for (int64_t i = 0; i < E + LANES; i++) weights[i] = i < E ? logits[i] : -INFINITY;
    const float top = weights[first_largest(weights, E)];
    vec totals = {0};
    for (int64_t i = 0; i < E; i += LANES) {
        const vec weight = exponential(load(weights + i) - top);
        store(weights + i, weight);
        totals += weight;
    }
    float of_chosen = 0;
    for (int64_t j = 0; j < k; j++) {
        chosen[j] = first_largest(weights, E);
        of_chosen += factors[j] = weights[chosen[j]];
        weights[chosen[j]] = -1;
    }
    const float total = e->normalizes ? of_chosen : sum(totals);
    for (int64_t j = 0; j < k; j++) factors[j] /= total;
    factors[k] = e->router.outputs > E ? 1.0f / (1.0f + exponential(splat(-logits[E]))[0]) : 1.0f;
}

static void route_rows(const Experts *e, const Routing *r, int64_t from, int64_t to) {
    const int64_t k = e->num_chosen;
    for (int64_t m = from; m < to; m++)
        route_row(e, r->logits + m * e->router.outputs, r->chosen + m * k, r->factors + m * (k + 1));
}

static void add_product(Products *products, Input in, const Weight *w, int64_t count, float **space, float *y) {
    products->all[products->count++] =
        (Product){in, w, count, *space, y, {products->num_tasks[0], products->num_tasks[1]}};
    products->num_tasks[0] += (prepared_rows(w, count) + PREPARED_TOGETHER - 1) / PREPARED_TOGETHER;
    products->num_tasks[1] += product_tasks(w, count);
    *space += WHOLE(count) * w->inputs;
}

/* Sort the pairs of M rows by expert; each expert that is used gets both its products. */
static void sort_rows(const Experts *e, Routing *r, int64_t M, const Input *in, int activation, float *inner) {
    const int64_t E = e->num_experts, k = e->num_chosen, N = e->down->outputs;
    int64_t counts[MAX_EXPERTS + 1] = {0}, first = 0;
    float *spaces[2] = {r->space, r->space}; /* the first inputs are no longer needed when the second are prepared */
    for (int64_t p = 0; p < M * k; p++) counts[r->chosen[p]]++;
    counts[E] = e->has_shared ? M : 0;
    r->gate_up = (Products){r->gate_up.all, 0, {0, 0}};
    r->down = (Products){r->down.all, 0, {0, 0}};
    for (int64_t expert = 0; expert <= E; expert++) {
        const int64_t count = counts[expert];
        counts[expert] = first; /* from here on, the next free pair of the expert */
        if (!count) continue;
        Input own = *in;
        own.rows = r->rows + first;
        add_product(&r->gate_up, own, e->gate_up + expert, count, &spaces[0], inner);
        const Input gated = {.x = inner, .activation = activation};
        add_product(&r->down, gated, e->down + expert, count, &spaces[1], r->outputs + first * N);
        inner += count * e->gate_up[expert].outputs;
        first += count;
    }
    for (int64_t m = 0; m < M; m++)
        for (int64_t j = 0; j < k + e->has_shared; j++) {
            const int64_t pair = counts[j < k ? r->chosen[m * k + j] : E]++;
            r->pairs[m * (k + 1) + j] = pair, r->rows[pair] = m;
        }
}

/* The product of a task of preparing (0) or multiplying (1). */
static const Product *find_product(const Products *products, int step, int64_t task) {
    int64_t low = 0, high = products->count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (products->all[middle].begin[step] <= task) low = middle;
        else high = middle;
    }
    return products->all + low;
}

/* The products of all experts that are used. */
static void share_products(Member *me, const Products *products, const Space *space) {
    float *row = space->own + me->thread * space->own_size;
    for (int64_t task; (task = next_task(me, products->num_tasks[0])) >= 0;) {
        const Product *one = find_product(products, 0, task);
        const int64_t from = (task - one->begin[0]) * PREPARED_TOGETHER, all = prepared_rows(one->w, one->count);
        for (int64_t m = from; m < all && m < from + PREPARED_TOGETHER; m++)
            prepare(&one->in, m, one->count, one->w, row, one->space);
    }
    meet(me);
    mark(me, space, PREPARATION);
    for (int64_t task; (task = next_task(me, products->num_tasks[1])) >= 0;) {
        const Product *one = find_product(products, 1, task);
        product_task(task - one->begin[1], one->space, one->count, one->w, one->y, 0);
    }
    meet(me);
}

/* x[M, N] += the outputs of each row's experts, times their factors. */
static void share_sum(Member *me, const Experts *e, const Routing *r, int64_t M, int64_t N, float *x) {
    const int64_t parts = (N + SUMMED_TOGETHER - 1) / SUMMED_TOGETHER, k = e->num_chosen;
    for (int64_t task; (task = next_task(me, M * parts)) >= 0;) {
        const int64_t m = task / parts, n = task % parts * SUMMED_TOGETHER;
        const int64_t width = N - n < SUMMED_TOGETHER ? N - n : SUMMED_TOGETHER;
        float total[SUMMED_TOGETHER];
        for (int64_t j = 0; j < k + e->has_shared; j++) {
            const float *from = r->outputs + r->pairs[m * (k + 1) + j] * N + n;
            const float factor = r->factors[m * (k + 1) + j];
            for (int64_t i = 0; i < width; i++)
                total[i] = j ? total[i] + from[i] * factor : from[i] * factor;
        }
        put(x + m * N + n, total, 0, (int)width, 1);
    }
    meet(me);
}

/* x[M, N] += the MLP of a layer with experts; `in` is its input, and `inner` a buffer. */
static void share_experts(Member *me, const Experts *e, const Input *in, int64_t M, int activation,
                          float *inner, Routing *r, const Space *space, float *x) {
    share_multiply(me, in, M, &e->router, r->logits, 0, space);
    const int is_small = M <= MAX_ROUTED_TOGETHER;
    if (!is_small) {
        for (int64_t m; (m = next_task(me, M)) >= 0;) route_rows(e, r, m, m + 1);
        meet(me);
    }
    if (next_task(me, 1) == 0) {
        if (is_small) route_rows(e, r, 0, M);
        sort_rows(e, r, M, in, activation, inner);
    }
    meet(me);
    mark(me, space, ROUTER);
    share_products(me, &r->gate_up, space);
    mark(me, space, GATE_UP);
    share_products(me, &r->down, space);
    share_sum(me, e, r, M, e->down->outputs, x);
    mark(me, space, DOWN);
}

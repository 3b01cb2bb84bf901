/* The decoder on a CPU, one function per operation; plain.py has the same operations in torch.

   Every output element is summed in an order that depends only on its own row: not on the number of
   rows, on how a prompt was split, or on which blocks hold its keys. A request's results are
   therefore bitwise the same whatever shares its batch. Plain C with the compiler's vector types;
   only bytes.c and tiles.c use a specific instruction set. Threads are torch's own.

   Letters: M rows (tokens), K inputs, N outputs, H query heads, G key-value heads, D head size.

   All files form one compilation unit, so that everything can be inlined; each file uses only those
   that are included before it. */

#include "vectors.c"
#include "products.c"
#include "bytes.c"
#include "quantized.c"
#include "attention.c"

typedef struct {
    const void *panels;
    const float *bias;
    int64_t outputs, inputs, bits; /* 32 bits: floats */
} Weight;

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    Weight qkv, output, gate_up, down;
    double epsilon;
} Layer;

/* What all layers of a forward pass share, and buffers for the results between products. */
typedef struct {
    Cache cache;
    int64_t rows, heads;
    const float *cosine, *sine;
    const int64_t *slots;
    const int32_t *tables, *starts, *ends, *tasks;
    int64_t table_width, num_tasks, tokens, split;
    double scale;
    float *normed, *qkv, *attended, *inner, *active, *scratch;
} Pass;

static void share_multiply(const float *x, int64_t M, const Weight *w, float *y, int64_t adds,
                           float *scratch, Barrier *barrier) {
    if (w->bits == 32)
        share_linear(x, M, w->inputs, w->panels, w->outputs, w->bias, y, adds);
    else
        share_quantized_linear(x, M, w->inputs, w->panels, w->outputs, w->bits, w->bias, y, adds,
                               scratch, barrier);
    wait_at(barrier);
}

static void share_layer(const Layer *l, const Pass *p, float *x, Barrier *barrier) {
    const int64_t M = p->rows, hidden = l->output.outputs;
    share_rms_norm(x, l->input_norm, M, hidden, l->epsilon, p->normed);
    wait_at(barrier);
    share_multiply(p->normed, M, &l->qkv, p->qkv, 0, p->scratch, barrier);
    share_rotate_and_store(p->qkv, M, p->heads, p->cosine, p->sine, l->q_norm, l->k_norm, l->epsilon,
                           p->slots, &p->cache);
    wait_at(barrier);
    share_attention(p->qkv, p->heads, &p->cache, p->tables, p->table_width, p->starts, p->ends,
                    p->scale, p->tasks, p->num_tasks, p->tokens, p->split, p->attended);
    wait_at(barrier);
    share_multiply(p->attended, M, &l->output, x, 1, p->scratch, barrier);
    share_rms_norm(x, l->post_norm, M, hidden, l->epsilon, p->normed);
    wait_at(barrier);
    share_multiply(p->normed, M, &l->gate_up, p->inner, 0, p->scratch, barrier);
    share_silu_multiply(p->inner, M, l->down.inputs, p->active);
    wait_at(barrier);
    share_multiply(p->active, M, &l->down, x, 1, p->scratch, barrier);
}

/* Run one layer on x[M, hidden] in place, with one team of threads. */
void layer(const Layer *l, const Pass *p, float *x) {
    Barrier barrier = {0, 0};
#pragma omp parallel
    share_layer(l, p, x, &barrier);
}

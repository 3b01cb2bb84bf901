/* Norms, gates and the choice of the largest number. */

ALWAYS void normalize(const float *x, const float *weight, int64_t n, float epsilon, float *y) {
    vec squares = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) squares = multiply_add(load(x + i), load(x + i), squares);
    for (; i < n; i++) rest += x[i] * x[i];
    float factor = 1.0f / sqrtf((sum(squares) + rest) / (float)n + epsilon);
    for (i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

/* The place of the largest of n numbers, the first if there are several. */
static int64_t first_largest(const float *x, int64_t n) {
    vec tops[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) tops[v] = larger(tops[v], load(x + i + v * LANES));
    float top = largest(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    for (i = 0; i + 8 * LANES <= n; i += 8 * LANES) {
        ivec is_top = {0};
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) is_top |= load(x + i + v * LANES) == splat(top);
        if (sum(__builtin_convertvector(is_top, vec)) != 0) break;
    }
    for (; i < n; i++)
        if (x[i] == top) return i;
    return 0;
}

/* The activations of gates. GELU in its tanh form is x times a sigmoid too, of an odd cubic of x. */
enum { NO_GATE, SILU, GELU, CLAMPED_SWIGLU };
#define GELU_LINEAR 1.5957691216f /* 2 sqrt(2 / pi) */
#define GELU_CUBIC 0.0713548163f  /* 0.044715 times that */
#define SWIGLU_ALPHA 1.702f
#define SWIGLU_LIMIT 7.0f

ALWAYS vec at_most(vec x, float limit) { return -larger(-x, splat(-limit)); }

/* y[N] = activation(x[:N]) * x[N:]. N is a multiple of LANES. */
ALWAYS void gate(const float *x, int64_t N, const int activation, float *y) {
    for (int64_t i = 0; i < N; i += LANES) {
        vec gate = load(x + i), up = load(x + N + i), slope = gate;
        if (activation == GELU)
            slope = gate * multiply_add(gate * gate, splat(GELU_CUBIC), splat(GELU_LINEAR));
        if (activation == CLAMPED_SWIGLU) {
            gate = at_most(gate, SWIGLU_LIMIT), slope = gate * SWIGLU_ALPHA;
            up = larger(at_most(up, SWIGLU_LIMIT), splat(-SWIGLU_LIMIT)) + 1.0f;
        }
        store(y + i, gate / (1.0f + exponential(-slope)) * up);
    }
}
